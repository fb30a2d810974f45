# ruff: noqa: ANN001, ANN202 (device code)
"""What the tests take out of Triton's interpreter for speed leaves its results as they were."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


@pytest.fixture(autouse=True)
def language_of_triton() -> Iterator[None]:
    """A launch patches Triton's language for all later ones, so undo what a slow launch patched."""
    from tests.support.quick_interpreter import unpatch_the_language  # imports Triton

    yield
    unpatch_the_language()


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.quick_interpreter import OF_TRITON, unpatch_the_language  # imports Triton

    unpatch_the_language()
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


def test_operands_are_converted_as_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same type, shape and bytes, or with the same error: tensors of all types and shapes, and numbers."""
    from triton.runtime import interpreter  # not where the interpreter is off

    dtypes = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64]
    kinds = [*dtypes, tl.pointer_type(tl.float32)]
    numbers = [0, 1, -1, 3, 300, 2**40, 2**70, True, 0.5, -2.0, 1e-300, 1e300, float("inf"), "text"]

    def operand(dtype: Any, shape: tuple[int, ...]) -> Any:
        data = np.ones(shape or 1, dtype=interpreter._get_np_dtype(dtype))
        return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)

    def outcome(one: Any, other: Any, *flags: bool) -> object:
        try:
            found = interpreter.interpreter_semantic.binary_op_type_checking_impl(one, other, *flags)
        except Exception as error:
            return type(error), str(error)
        return [(str(each.type), each.handle.data.tobytes(), each.handle.data.shape) for each in found]

    def outcomes() -> list[object]:
        found = []
        for flags in itertools.product([True, False], [True, False], [True, False]):
            pointers, arithmetic, divides = flags
            for one, other in itertools.product(kinds, [*kinds, *numbers]):
                for shapes in (((), ()), ((4,), (4,)), ((4, 1), (1, 8)), ((), (8,)), ((4, 8), (8,)), ((2,), (4,))):
                    left = operand(one, shapes[0])
                    right = operand(other, shapes[1]) if isinstance(other, tl.dtype) else other
                    given = (pointers, pointers, arithmetic, divides)
                    found += [outcome(left, right, *given), outcome(right, left, *given)]
        return found

    ours = outcomes()
    slow(monkeypatch)
    different = [pair for pair in zip(ours, outcomes(), strict=True) if pair[0] != pair[1]]
    assert not different[:3]
    assert sum(isinstance(each, list) for each in ours) > len(ours) // 2
