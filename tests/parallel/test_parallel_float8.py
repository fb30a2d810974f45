"""Layers in 8 bits in two processes over gloo. ``tests/gpu`` runs the same over NCCL."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support import float8_parallel_checks as checks
from tests.support.operands import ON_GPU, needs_kernels
from tests.support.processes import Processes

# They share the processes of tests/parallel/test_parallel.py.
pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_parallel_gpu.py runs the same checks on two GPUs"),
]

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install '.[models]'"
)


@needs_kernels
@pytest.mark.parametrize(("engine", "mixed"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_data_parallel_in_8_bits(processes: Processes, engine: str, mixed: bool) -> None:
    processes.run(checks.check_data_parallel, engine, mixed)


@needs_kernels
@needs_transformers
def test_a_model_of_transformers_in_8_bits(processes: Processes) -> None:
    processes.run(checks.check_model_of_transformers)


@needs_kernels
@pytest.mark.parametrize("tokens_split", [False, True], ids=["replicated", "sequence parallel"])
def test_tensor_parallel_in_8_bits(processes: Processes, tokens_split: bool) -> None:
    processes.run(checks.check_tensor_parallel, tokens_split)


@needs_kernels
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("tokens_split", [False, True], ids=["replicated", "sequence parallel"])
def test_linears_in_parts_in_8_bits(processes: Processes, tokens_split: bool, compiled: bool) -> None:
    processes.run(checks.check_linears_in_parts, tokens_split, compiled)


@needs_kernels
def test_linears_in_uneven_parts(processes: Processes) -> None:
    processes.run(checks.check_uneven_parts)


@needs_kernels
def test_expert_parallel_in_8_bits(processes: Processes) -> None:
    processes.run(checks.check_expert_parallel)
