"""Replaced models of transformers in two processes over gloo: DDP, FSDP2. ``tests/gpu`` runs the same over NCCL."""

from __future__ import annotations

import pytest

from tests.models import distributed_checks as checks
from tests.models.test_families import installed
from tests.support.operands import ON_GPU, needs_kernels
from tests.support.parallel_checks import compiled_kernels
from tests.support.processes import Processes

# They share the processes of tests/parallel/test_parallel.py.
pytestmark = [
    # Two processes that import transformers; tests/parallel/test_parallel.py has replaced blocks under both engines.
    pytest.mark.full,
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_parallel_gpu.py runs the same checks on two GPUs"),
]
ENGINES = pytest.mark.parametrize("engine", ["ddp", "fsdp"])
# A block of linears, of transposed ones, and inside a method of the layer that FSDP2 shards.
NAMES = pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])


@ENGINES
@NAMES
@pytest.mark.parametrize(
    ("path", "precision"),
    [
        pytest.param("kernels", "whole", marks=needs_kernels),
        pytest.param("kernels", "mixed", marks=compiled_kernels),
        ("torch", "whole"),
        ("torch", "mixed"),
    ],
)
def test_two_steps_are_the_same(processes: Processes, engine: str, name: str, path: str, precision: str) -> None:
    installed(name)
    processes.run(checks.check_training, engine, name, path, precision)


@ENGINES
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_checkpointing_stays(processes: Processes, engine: str, name: str) -> None:
    installed(name)
    processes.run(checks.check_training, engine, name, "torch", "whole", True)


@ENGINES
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_experts(processes: Processes, engine: str, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")
    processes.run(checks.check_experts, engine, name)


@needs_kernels
@pytest.mark.parametrize("engine", ["ddp", "ddp, unused", "fsdp"])
def test_a_loss_without_logits(processes: Processes, engine: str) -> None:
    installed("Llama")
    processes.run(checks.check_loss, engine)
