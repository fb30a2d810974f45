"""Blocks in two processes over gloo: DDP, FSDP2, tensor parallelism. ``tests/gpu`` runs the same over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support import parallel_checks as checks
from tests.support.operands import ON_GPU, needs_kernels
from tests.support.processes import Processes

# One pair of processes serves all tests of a worker of xdist.
pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_parallel_gpu.py runs the same checks on two GPUs"),
]
KERNELS = pytest.param("kernels", marks=needs_kernels)
PATHS = pytest.mark.parametrize("path", [KERNELS, "chunked", "torch"])


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("kind", ["plain", "gated", "replaced"])
@pytest.mark.parametrize("path", [KERNELS, "chunked"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_data_parallel(processes: Processes, engine: str, kind: str, path: str) -> None:
    processes.run(checks.check_data_parallel, engine, kind, path, "whole")


@pytest.mark.parametrize("kind", ["gated", "replaced"])
@pytest.mark.parametrize("path", [pytest.param("kernels", marks=checks.compiled_kernels), "chunked", "torch"])
def test_fsdp_in_mixed_precision(processes: Processes, kind: str, path: str) -> None:
    processes.run(checks.check_data_parallel, "fsdp", kind, path, "mixed")


@PATHS
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("tokens_split", [False, True], ids=["replicated", "sequence parallel"])
def test_tensor_parallel(processes: Processes, path: str, gated: bool, tokens_split: bool) -> None:
    processes.run(checks.check_tensor_parallel, path, gated, True, tokens_split, checks.D_FF, False, "kept")


@pytest.mark.parametrize("way", checks.WAYS[1:])
def test_tensor_parallel_keeping_less(processes: Processes, way: str) -> None:
    processes.run(checks.check_tensor_parallel, "chunked", True, True, True, checks.D_FF, False, way)


@pytest.mark.parametrize("path", ["chunked", "torch"])
def test_tensor_parallel_in_parts_that_differ_and_without_biases(processes: Processes, path: str) -> None:
    processes.run(checks.check_tensor_parallel, path, True, False, False, checks.D_FF + 1, False, "kept")


def test_tensor_parallel_under_autocast(processes: Processes) -> None:
    processes.run(checks.check_tensor_parallel, "torch", True, True, False, checks.D_FF, True, "kept")


even_or_not = pytest.mark.parametrize(
    "d_ff",
    [
        pytest.param(checks.D_FF, id="even"),
        pytest.param(
            checks.D_FF + 1,
            id="uneven",
            marks=pytest.mark.skipif(
                TorchVersion(torch.__version__) < "2.13",
                reason="in compiled graphs torch 2.11 expects gradients of process 0's shape in all processes",
            ),
        ),
    ],
)


@pytest.mark.sampled
@even_or_not
@pytest.mark.parametrize("tokens_split", [False, True], ids=["replicated", "sequence parallel"])
def test_tensor_parallel_in_one_compiled_graph(processes: Processes, d_ff: int, tokens_split: bool) -> None:
    processes.run(checks.check_compiled, d_ff, tokens_split)


@PATHS
@pytest.mark.parametrize("way", ["kept", "non-reentrant"])
def test_dropout_differs_between_processes_and_is_replayed(processes: Processes, path: str, way: str) -> None:
    processes.run(checks.check_dropout, path, way)


def test_sharded_checkpoints(processes: Processes, tmp_path: Path) -> None:
    processes.run(checks.check_checkpoint, str(tmp_path / "shards"))


@pytest.mark.parametrize(
    "check",
    [
        checks.check_children_that_are_not_plain,
        checks.check_two_dimensions,
        checks.check_distributed_inputs_and_results,
        checks.check_explanation,
        checks.check_wrong_arguments,
        checks.check_what_cannot_be_split,
    ],
)
def test_tensor_parallel_modules(processes: Processes, check: object) -> None:
    processes.run(check)


def test_the_import_is_delayed(run_python: Callable[..., object]) -> None:
    """Whoever does not ask for tensor parallelism does not wait for its import, nor for that of transformers."""
    code = """
import sys, fusedlayers
assert not {"torch.distributed.tensor", "transformers"} & sys.modules.keys()
assert fusedlayers.parallel.FusedFFNParallel().use_local_output
try:
    fusedlayers.paralel
except AttributeError as error:
    assert "no attribute 'paralel'" in str(error)
else:
    raise AssertionError("a name that does not exist")
"""
    run_python(code)
