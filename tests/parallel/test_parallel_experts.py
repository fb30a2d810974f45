"""Experts in two processes over gloo. ``tests/gpu`` runs the same over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import expert_parallel_checks as checks
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
MIXTRAL = pytest.param("Mixtral", marks=needs_transformers)
PATHS = pytest.mark.parametrize("path", [pytest.param("triton", marks=needs_kernels), "torch"])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with biases and a shared expert": {"bias": True, "shared_d_ff": 20, "scores": "sigmoid"},
    "not gated": {"gated": False, "activation": "gelu"},
    "recomputed": {"recompute": True},
}
HALVES = (checks.TOKENS // 2, checks.TOKENS // 2)


@pytest.mark.parametrize("case", OPTIONS)
def test_a_mixture_in_parts(processes: Processes, case: str) -> None:
    processes.run(checks.check_experts_in_parts, "FusedMoE", "torch", torch.float32, HALVES, OPTIONS[case])


@needs_kernels
@pytest.mark.parametrize("case", ["plain", "recomputed"])
def test_a_mixture_in_parts_in_kernels(processes: Processes, case: str) -> None:
    processes.run(checks.check_experts_in_parts, "FusedMoE", "triton", torch.float32, HALVES, OPTIONS[case])


@needs_transformers
@PATHS
@pytest.mark.parametrize("kind", ["Mixtral", "gpt-oss"])
def test_replaced_experts_in_parts(processes: Processes, kind: str, path: str) -> None:
    processes.run(checks.check_experts_in_parts, kind, path, torch.float32, HALVES, {})


@pytest.mark.parametrize("mine", [(checks.TOKENS - 3, 3), (0, checks.TOKENS)], ids=str)
def test_processes_with_other_numbers_of_tokens(processes: Processes, mine: tuple[int, int]) -> None:
    processes.run(checks.check_experts_in_parts, "FusedMoE", "torch", torch.float32, mine, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(processes: Processes, dtype: torch.dtype) -> None:
    processes.run(checks.check_experts_in_parts, "FusedMoE", "torch", dtype, HALVES, {})


@pytest.mark.parametrize("mine", [HALVES, (0, checks.TOKENS)], ids=str)
@pytest.mark.parametrize("case", ["plain", "with biases and a shared expert"])
def test_autocast(processes: Processes, case: str, mine: tuple[int, int]) -> None:
    processes.run(checks.check_autocast, "FusedMoE", mine, OPTIONS[case])


@needs_transformers
def test_replaced_experts_under_autocast(processes: Processes) -> None:
    processes.run(checks.check_autocast, "Mixtral", HALVES, {})


@pytest.mark.parametrize(
    "check",
    [
        checks.check_no_tokens_anywhere,
        checks.check_one_process_has_all_the_work,
        checks.check_the_same_bits_every_time,
        checks.check_frozen_experts,
        checks.check_wrong_arguments,
        checks.check_data_parallel,
        checks.check_verify,
        checks.check_refusals,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_expert_parallelism(processes: Processes, check: Callable[[], None]) -> None:
    processes.run(check)


@pytest.mark.parametrize("kind", ["FusedMoE", MIXTRAL, "own"])
def test_copies(processes: Processes, kind: str) -> None:
    processes.run(checks.check_copies, kind)


@pytest.mark.parametrize("kind", ["FusedMoE", MIXTRAL])
def test_explanations(processes: Processes, kind: str) -> None:
    processes.run(checks.check_explanation, kind)


@needs_transformers
def test_arguments_by_name(processes: Processes) -> None:
    processes.run(checks.check_keywords)


def test_shards_of_experts(processes: Processes, tmp_path: Path) -> None:
    processes.run(checks.check_checkpoint, str(tmp_path / "shards"))
