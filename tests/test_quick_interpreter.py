# ruff: noqa: ANN001, ANN202 (device code)
"""What the tests take out of Triton's interpreter for speed leaves its results as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedlayers.kernels.device import tl, triton

pytestmark = pytest.mark.interpreter


@triton.jit
def _later(value, place, other, other_place):
    """Neither commutative nor associative, of two values."""
    return value * 0.5 + other, tl.where(other > value, other_place, place)


@triton.jit
def _reduce_kernel(
    x_ptr, sums_ptr, places_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    numbers = rows[:, None] * N + cols[None, :]
    sums, places = tl.reduce((x, numbers), AXIS, _later, keep_dims=KEEP)
    if KEEP:
        out = rows[:, None] if AXIS == 1 else cols[None, :]
    else:
        out = rows if AXIS == 1 else cols
    tl.store(sums_ptr + out, sums)
    tl.store(places_ptr + out, places)


@triton.jit
def _vector_kernel(x_ptr, sums_ptr, places_ptr, N: tl.constexpr):
    cols = tl.arange(0, N)
    sums, places = tl.reduce((tl.load(x_ptr + cols), cols), 0, _later)
    tl.store(sums_ptr, sums)
    tl.store(places_ptr, places)


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.quick_interpreter import OF_TRITON  # imports Triton

    monkeypatch.setattr(*OF_TRITON)


def launched(kernel: Callable[..., Any], x: torch.Tensor, count: int) -> list[torch.Tensor]:
    outputs = [torch.zeros(count), torch.zeros(count, dtype=torch.int32)]
    kernel(x, *outputs)
    return outputs


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_reductions_are_those_of_triton(monkeypatch: pytest.MonkeyPatch, axis: int, keep: bool) -> None:
    x = torch.randn(8, 16)
    kernel = functools.partial(_reduce_kernel[(1,)], AXIS=axis, KEEP=keep, M=8, N=16)
    ours = launched(kernel, x, (16, 8)[axis])
    slow(monkeypatch)
    theirs = launched(kernel, x, (16, 8)[axis])
    assert all(map(torch.equal, ours, theirs))
    assert theirs[1].unique().numel() > 1


def test_reductions_of_vectors_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16)
    kernel = functools.partial(_vector_kernel[(1,)], N=16)
    ours = launched(kernel, x, 1)
    slow(monkeypatch)
    assert all(map(torch.equal, ours, launched(kernel, x, 1)))
