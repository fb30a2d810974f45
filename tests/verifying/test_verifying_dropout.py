"""`verify` and dropout: refused where random numbers would be drawn, and judged as strictly with a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional
from fusedlayers.kernels import gemm_gemm
from tests.support.operands import DEVICE, needs_kernels


def normal(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options)


def test_dropout_in_training_is_refused_and_nothing_is_drawn() -> None:
    layer = fl.FusedFFN(6, 10, dropout=0.5)
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"target: FusedFFN draws random numbers.*\.eval\(\)"):
        fl.verify(layer, normal(5, 6))
    assert layer.training
    x, w_up, w_down = normal(5, 6), normal(10, 6), normal(6, 10)
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match="target: ffn draws random numbers"):
        fl.verify(functional.ffn, x, w_up, w_down, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), generator)
    assert fl.verify(layer.eval(), normal(5, 6)).ok


def _times(factor: float) -> Callable[..., Any]:
    return lambda forward, operands, *rest: forward(operands, *rest) * factor


def _other_mask(forward: Callable[..., Any], operands: Any, *rest: Any) -> Any:
    return forward(replace(operands, seed=operands.seed + 1), *rest)


def _no_dropout(forward: Callable[..., Any], operands: Any, *rest: Any) -> Any:
    return forward(replace(operands, seed=None, arithmetic=replace(operands.arithmetic, dropout_p=0.0)), *rest)


# What a wrong kernel may make of a forward pass with dropout.
WRONG: dict[str, Callable[..., Any]] = {
    "zero": _times(0.0),
    "a hundredth more": _times(1.01),
    "another mask": _other_mask,
    "no dropout": _no_dropout,
}


@needs_kernels
@pytest.mark.parametrize("wrong", [None, *WRONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout_with_a_seed_is_judged_as_strictly(
    wrong: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    forward = gemm_gemm.forward
    if wrong is not None:
        monkeypatch.setattr(gemm_gemm, "forward", lambda *arguments: WRONG[wrong](forward, *arguments))
    shapes = (80, 24), (64, 24), (24, 64)
    inputs = [(normal(*shape) / shape[1] ** 0.5).to(DEVICE, dtype) for shape in shapes]
    seed = torch.tensor([7], device=DEVICE)
    found = fl.verify(functional.ffn, *inputs, dropout_p=0.5, dropout_seed=seed)
    assert found.paths == {"ffn fused": 1}
    assert found.ok is (wrong is None), found
    assert [verdict.name for verdict in found.verdicts if not verdict.ok] == (["y"] if wrong else [])


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_with_a_seed_is_green_on_the_path_here(recompute: bool) -> None:
    inputs, seed = (normal(80, 24), normal(64, 24) / 5, normal(24, 64) / 8), torch.tensor([7])
    assert fl.verify(functional.ffn, *inputs, dropout_p=0.5, dropout_seed=seed, recompute=recompute).ok
