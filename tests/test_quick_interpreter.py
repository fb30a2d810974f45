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

    for patched in OF_TRITON:
        monkeypatch.setattr(*patched)


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


@triton.jit
def _arithmetic_kernel(x_ptr, places_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    # Past what 32 bits hold, where Triton looks for an overflow in debug mode alone.
    places = (rows[:, None] * 40000 + cols[None, :]) * 60000 - rows[:, None]
    here = x_ptr + rows[:, None] * N + cols[None, :]
    values = tl.load(here, mask=cols[None, :] < N - 1, other=2.0) / 3 + tl.program_id(0)
    tl.store(here, tl.trans(tl.dot(tl.trans(values), values.to(tl.float32), input_precision="ieee")))
    tl.store(places_ptr + rows[:, None] * N + cols[None, :], places)


def test_arithmetic_is_that_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x, places = torch.randn(16, 16), torch.zeros(16, 16, dtype=torch.int32)
    ours = x.clone(), places.clone()
    _arithmetic_kernel[(1,)](*ours, M=16, N=16)
    slow(monkeypatch)
    theirs = x.clone(), places.clone()
    _arithmetic_kernel[(1,)](*theirs, M=16, N=16)
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(theirs[0], x)
    assert theirs[1].min() < 0


def test_types_and_values_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> list[object]:
        """All that a type and a value of it hold, twice, so that the second time the shape is known."""
        found: list[object] = []
        for scalar in (tl.float32, tl.pointer_type(tl.float16), tl.float32, tl.int64):
            kinds = [tl.block_type(scalar, shape) for shape in ([4, 8], [8, 4], [tl.constexpr(4), 8], [1])]
            kinds += [kind.with_element_ty(tl.int1) for kind in kinds]
            for kind in (scalar, *kinds):
                value = tl.tensor("handle", kind)
                found += [str(kind), kind.scalar, repr(sorted(vars(kind).items())), repr(sorted(vars(value).items()))]
                found.append(type(value.shape))
        return found

    ours = described()
    slow(monkeypatch)
    assert ours == described()


@pytest.mark.parametrize("shape", [[], [3], [2**21], [4.0]], ids=str)
def test_shapes_that_triton_refuses_are_refused(shape: list[int]) -> None:
    # A number that is equal to a size is none.
    tl.block_type(tl.float32, [4])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=r"0d block_type|power of 2|numel|must have type"):
            tl.block_type(tl.float32, shape)
