"""Integer inputs that an operation keeps exact in a dtype, and the integers that must come out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedlayers import reference
from tests.operands import Tensors, ffn_inputs, in_float64, integers, like_result, results

DENSITIES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.2, 0.16, 0.13, 0.11, 0.09, 0.075, 0.06, 0.05, 0.04, 0.03, 0.02)


class _Largest(TorchDispatchMode):
    """The largest magnitude among the float64 results of all torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and tensor.numel():
                self.value = max(self.value, float(tensor.abs().max()))
        return result


def exact(
    operation: Callable[..., Tensor],
    draw_inputs: Callable[[Callable[..., Tensor]], tuple[Tensors, Tensor]],
    dtype: torch.dtype,
    **arithmetic: Any,
) -> tuple[Tensors, Tensor, Tensors]:
    """Inputs, upstream gradient, and the results that must come out, bit for bit.

    The densest integers are taken that keep every intermediate result of the float64 reference at or below the integer
    up to which ``dtype`` counts. ``draw_inputs`` makes inputs and gradient from a ``draw`` of ``tests.operands``.
    """
    for density in DENSITIES:
        inputs, dy = draw_inputs(integers(density))
        with _Largest() as largest:
            truth = results(operation, in_float64(inputs), dy.double(), **arithmetic)
        if largest.value <= 2 / torch.finfo(dtype).eps:
            return inputs, dy, {name: None if value is None else value.to(dtype) for name, value in truth.items()}
    raise ValueError(f"no density keeps {largest.value} within {dtype}")


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


def assert_says_something(expected: Tensors) -> None:
    """More than a few elements of each result differ from 0, so that a wrong sum has where to show."""
    for name, tensor in expected.items():
        if tensor is not None:
            share = float((tensor != 0).double().mean())
            assert share > 0.005, f"{name} has {share:.1%} elements that are not 0"
