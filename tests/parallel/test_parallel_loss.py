"""The loss head in two processes over gloo: DDP, FSDP2, and classes in parts. ``tests/gpu`` runs the same over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import loss_parallel_checks as checks
from tests.support.operands import ON_GPU, needs_kernels
from tests.support.processes import Processes

# They share the processes of tests/parallel/test_parallel.py.
pytestmark = [
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_parallel_gpu.py runs the same checks on two GPUs"),
]
PATHS = pytest.mark.parametrize("path", [pytest.param("chunked", marks=needs_kernels), "torch"])
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, with a bias": {"reduction": "sum", "bias": True},
    "every token": {"reduction": "none"},
    "another is ignored": {"ignore_index": 3},
    "scaled": {"logit_scale": 0.25, "bias": True},
    "capped": {"softcap": 2.0, "logit_scale": 1.5, "reduction": "none"},
    "with a z-loss": {"z_loss": 0.1, "softcap": 5.0, "bias": True},
}


@pytest.mark.sampled
@PATHS
@pytest.mark.parametrize("case", OPTIONS)
def test_classes_in_parts(processes: Processes, case: str, path: str) -> None:
    processes.run(checks.check_classes_in_parts, path, OPTIONS[case], torch.float32, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_classes_in_parts_in_other_dtypes(processes: Processes, dtype: torch.dtype) -> None:
    processes.run(checks.check_classes_in_parts, "torch", {"reduction": "none", "bias": True}, dtype, False)


@PATHS
def test_classes_in_parts_with_tokens_in_parts(processes: Processes, path: str) -> None:
    processes.run(checks.check_classes_in_parts, path, {}, torch.float32, True)


@PATHS
def test_no_tokens(processes: Processes, path: str) -> None:
    processes.run(checks.check_no_tokens, path)


@PATHS
def test_frozen_classes(processes: Processes, path: str) -> None:
    processes.run(checks.check_frozen_classes, path)


def test_autocast(processes: Processes) -> None:
    processes.run(checks.check_autocast)


@pytest.mark.parametrize("tokens_split", [False, True], ids=["replicated", "tokens in parts"])
def test_compiled(processes: Processes, tokens_split: bool) -> None:
    processes.run(checks.check_compiled, tokens_split)


@PATHS
def test_targets_that_are_no_classes(processes: Processes, path: str) -> None:
    processes.run(checks.check_targets_that_are_no_classes, path)


@pytest.mark.parametrize(
    "check",
    [checks.check_called_linears, checks.check_wrong_arguments, checks.check_refusals],
    ids=["called", "wrong arguments", "refused"],
)
def test_what_is_not_split(processes: Processes, check: Any) -> None:
    processes.run(check)


@PATHS
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_data_parallel_loss(processes: Processes, engine: str, path: str) -> None:
    processes.run(checks.check_data_parallel, engine, path)
