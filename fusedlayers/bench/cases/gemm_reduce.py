"""The batched GEMM-reduce."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ... import functional, reference
from ...kernels.activations import ACTIVATIONS
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import Case, Grid, Operand, Options, Shape
from .trial import Trial

# (kept rows, reduced rows) of the trials: every number of consumers, both blocks; and their inner widths.
_REDUCED = ((40, 16), (128, 304), (200, 64), (120, 600), (264, 1024))
_PORTABLE_WIDTHS = (16, 24, 64, 128, 256, 1000)

_SHAPES = ((64, 1024, 1024, 128), (64, 2048, 2048, 64), (1024, 32, 4096, 128))
_WITHOUT_GPU = ((4, 96, 160, 32), (2, 70, 33, 24))


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    batch, rows, columns, width = shape
    return {"a": Operand((batch, rows, width)), "b": Operand((batch, width, columns), width**-0.5)}


def _flops(shape: Shape, options: Options) -> int:
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


def _trials(device: Device) -> Iterator[Trial]:
    # Indices are found for the gradients of a maximum alone, and a sum of squares stays exact in float16 alone.
    kinds = (("max", "bf16"), ("sumsq", "fp16"))
    if device.backend != GENERIC:
        for kept, reduced in _REDUCED:
            for width in (64, 128):
                for op, dtype in kinds:
                    yield Trial("gemm_reduce", Options(op=op, dim=-1), (2, kept, reduced, width), dtype, "few")
                    yield Trial("gemm_reduce", Options(op=op, dim=-2), (2, reduced, kept, width), dtype, "few")
        # An inner width that is padded, of operands one of which lies transposed.
        for rows, columns in ((136, 304), (304, 136)):
            yield Trial("gemm_reduce", Options(op="max", dim=-1), (3, rows, columns, 72), "bf16", "few")
            yield Trial("gemm_reduce", Options(op="max", dim=-2), (3, rows, columns, 72), "bf16", "few")
    # Both gradients at once; with as many entries as SMs, too.
    for kept, width in itertools.product((20, 56, 120), (24, 64, 128)):
        yield Trial("gemm_reduce", Options(op="sumsq", dim=-1), (2, kept, 300, width), "fp16", "few")
    yield Trial("gemm_reduce", Options(op="sumsq", dim=-1), (device.sms, 56, 150, 128), "fp16", "few")
    for width in _PORTABLE_WIDTHS:
        for op, dtype in kinds:
            yield Trial("gemm_reduce", Options("relu", op=op), (2, 127, 129, width), dtype, "generic")
            yield Trial("gemm_reduce", Options(op=op, dim=-1), (2, 127, 129, width), "fp32", "generic")


CASE = Case(
    name="gemm_reduce",
    operation="gemm_reduce",
    place=2,
    letters=("B", "M", "N", "K"),
    meaning="batch × rows × columns × inner",
    grids=(
        _grid("gemm_reduce_max_m", "Batched GEMM-reduce, max over M", "max", -2, _SHAPES),
        _grid("gemm_reduce_max_n", "Batched GEMM-reduce, max over N", "max", -1, _SHAPES),
        _grid("gemm_reduce_logsumexp_n", "Batched GEMM-reduce, logsumexp over N", "logsumexp", -1, _SHAPES[:1]),
        _grid("gemm_reduce_sum_m", "Batched GEMM-reduce, sum over M", "sum", -2, _SHAPES[:1]),
    ),
    flags=frozenset({"op", "dim"}),
    operands=_operands,
    keywords=_keywords,
    ours=functional.gemm_reduce,
    torch_expression=_torch_gemm_reduce,
    forward_flops=_flops,
    trials=_trials,
    few_trials=(
        Trial("gemm_reduce", Options("relu", op="max"), (2, 37, 33, 24), "fp16"),
        Trial("gemm_reduce", Options(op="sumsq", dim=-1), (2, 37, 33, 24), "fp32"),
    ),
)
