"""Integer inputs that an operation keeps exact in a dtype, and the integers that must come out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedlayers import reference
from fusedlayers.bench.exactness import ExactnessWatch
from tests.support.operands import DEVICE, Tensors, ffn_inputs, in_float64, integers, like_result, results

DENSITIES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.2, 0.16, 0.13, 0.11, 0.09, 0.075, 0.06, 0.05, 0.04, 0.03, 0.02)
# Of one operand where sums are long and the other tensors stay as dense as they are.
SPARSER = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015, 0.008, 0.004, 0.002, 0.001)


def exact(
    operation: Callable[..., Tensor],
    draw_inputs: Callable[[Callable[..., Tensor]], tuple[Tensors, Tensor]],
    dtype: torch.dtype,
    densities: tuple[float, ...] = DENSITIES,
    **arithmetic: Any,
) -> tuple[Tensors, Tensor, Tensors]:
    """Inputs, upstream gradient, and the results that must come out, bit for bit.

    The densest integers are taken that keep every intermediate result of the float64 reference at or below the integer
    up to which ``dtype`` counts. ``draw_inputs`` makes inputs and gradient from a ``draw`` of
    ``tests.support.operands``.
    """
    for density in densities:
        inputs, dy = draw_inputs(integers(density))
        with ExactnessWatch() as watch:
            truth = results(operation, in_float64(inputs), dy.double(), **arithmetic)
        if watch.largest <= 2 / torch.finfo(dtype).eps:
            return inputs, dy, {name: None if value is None else value.to(dtype) for name, value in truth.items()}
    raise ValueError(f"no density keeps {watch.largest} within {dtype}")


def exact_ffn(
    leading: tuple[int, ...] | int,
    K: int,
    N: int,
    O: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: bool = False,
    **arithmetic: Any,
) -> tuple[Tensors, Tensor, Tensors]:
    """:func:`exact` for ``ffn`` with all biases; ``arithmetic`` is what the reference takes beside the tensors."""

    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        inputs = ffn_inputs(leading, K, N, O, dtype, gated=gated, residual=residual, draw=draw)
        return inputs, like_result(inputs, draw)

    return exact(reference.ffn, draw_inputs, dtype, **arithmetic)


def exact_reduction(
    op: str, dim: int, size: tuple[int, int, int, int], dtype: torch.dtype, activation: str | None = None, **taking: Any
) -> tuple[Tensors, Tensor, Tensors]:
    """:func:`exact` for a reduction: the operand that is reduced is as sparse as its length demands, the other is not.

    The gradient of a maximum reaches no more rows of the reduced operand than there are kept ones, and where thousands
    of squares add up to no more than a 16-bit number counts to, few differ from 0.
    """
    batch, M, N, K = size
    kept_rows, reduced_rows = (N, M) if dim == -2 else (M, N)
    summed = op in ("sum", "sumsq")
    dense = integers(0.15 if summed else 0.7)

    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        a, b = (draw, dense) if dim == -2 else (dense, draw)
        inputs = {"a": a(batch, M, K, dtype=torch.float32), "b": b(batch, K, N, dtype=torch.float32)}
        if summed:  # sums of ones stay exact the longest
            inputs = {name: tensor.sign() for name, tensor in inputs.items()}
        dy = integers(0.3 if summed else 1.0)(batch, kept_rows, dtype=torch.float32)
        return {name: tensor.to(DEVICE, dtype) for name, tensor in inputs.items()}, dy.to(DEVICE, dtype)

    inputs, dy, expected = exact(
        reference.gemm_reduce, draw_inputs, dtype, SPARSER, op=op, dim=dim, activation=activation, **taking
    )
    of_kept, of_reduced = ("db", "da") if dim == -2 else ("da", "db")
    assert_says_something({"y": expected["y"]}, 0.2)
    assert_says_something({of_kept: expected[of_kept]})
    reached = min(1.0, kept_rows / reduced_rows)
    assert_says_something({of_reduced: expected[of_reduced]}, 0.05 * reached)
    return inputs, dy, expected


def assert_says_something(expected: Tensors, least: float = 0.005) -> None:
    """More than a share ``least`` of each result differs from 0, so that a wrong sum has where to show."""
    for name, tensor in expected.items():
        if tensor is not None:
            share = float((tensor != 0).double().mean())
            assert share > least, f"{name} has {share:.1%} elements that are not 0"
