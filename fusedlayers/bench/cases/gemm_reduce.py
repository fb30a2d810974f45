"""The batched GEMM-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import functional, reference
from ...kernels.activations import ACTIVATIONS
from .case import Case, Grid, Operand, Options, Shape

_SHAPES = ((64, 1024, 1024, 128), (64, 2048, 2048, 64), (1024, 32, 4096, 128))
_WITHOUT_GPU = ((4, 96, 160, 32), (2, 70, 33, 24))


def _gemm_reduce_operands(shape: Shape, options: Options) -> dict[str, Operand]:
    batch, rows, columns, width = shape
    return {"a": Operand((batch, rows, width)), "b": Operand((batch, width, columns), width**-0.5)}


def _gemm_reduce_flops(shape: Shape, options: Options) -> int:
    """Of the product; a sum without an activation needs none, but a sum of each operand or a product with one row."""
    batch, rows, columns, width = shape
    if options.op in ("sum", "mean") and options.activation == "identity":
        return 2 * batch * (rows + columns) * width
    return 2 * batch * rows * columns * width


def _torch_gemm_reduce(a: Tensor, b: Tensor, *, op: str, dim: int, activation: str) -> Tensor:
    if op in ("max", "min") and not torch.is_grad_enabled():
        # Faster than max(dim), which looks for indices too; with gradients the two differ where values are equal.
        return getattr(ACTIVATIONS[activation].torch(torch.bmm(a, b)), f"a{op}")(dim)
    return reference.gemm_reduce(a, b, op=op, dim=dim, activation=activation)


def _keywords(options: Options) -> dict[str, object]:
    return {"op": options.op, "dim": options.dim, "activation": options.activation}


def _grid(name: str, title: str, op: str, dim: int, shapes: tuple[Shape, ...]) -> Grid:
    return Grid(name, title, Options(op=op, dim=dim), shapes, _WITHOUT_GPU)


GEMM_REDUCE = Case(
    name="gemm_reduce",
    letters=("B", "M", "N", "K"),
    meaning="batch × rows × columns × inner",
    parameters=frozenset(),
    flags=frozenset({"op", "dim"}),
    grids=(
        _grid("gemm_reduce_max_m", "Batched GEMM-reduce, max over M", "max", -2, _SHAPES),
        _grid("gemm_reduce_max_n", "Batched GEMM-reduce, max over N", "max", -1, _SHAPES),
        _grid("gemm_reduce_logsumexp_n", "Batched GEMM-reduce, logsumexp over N", "logsumexp", -1, _SHAPES[:1]),
        _grid("gemm_reduce_sum_m", "Batched GEMM-reduce, sum over M", "sum", -2, _SHAPES[:1]),
    ),
    operands=_gemm_reduce_operands,
    forward_flops=_gemm_reduce_flops,
    ours=functional.gemm_reduce,
    torch_expression=_torch_gemm_reduce,
    operation="gemm_reduce",
    our_keywords=_keywords,
    torch_keywords=_keywords,
)
