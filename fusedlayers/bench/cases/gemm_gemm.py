"""The batched GEMM-GEMM."""

from __future__ import annotations

from ... import functional, reference
from .case import Case, Grid, Operand, Options, Shape


def _gemm_gemm_operands(shape: Shape, options: Options) -> dict[str, Operand]:
    batch, rows, hidden, width, columns = shape
    return {
        "a": Operand((batch, rows, width)),
        "b": Operand((batch, width, hidden), width**-0.5),
        "c": Operand((batch, hidden, columns), hidden**-0.5),
    }


def _gemm_gemm_flops(shape: Shape, options: Options) -> int:
    batch, rows, hidden, width, columns = shape
    return 2 * batch * rows * hidden * (width + columns)


GEMM_GEMM = Case(
    name="gemm_gemm",
    letters=("B", "M", "N", "K", "O"),
    meaning="batch × rows × hidden × inner × output columns",
    parameters=frozenset(),
    flags=frozenset(),
    grids=(
        Grid(
            name="gemm_gemm",
            title="Batched GEMM-GEMM, no activation",
            options=Options("identity"),
            shapes=(
                (4, 1024, 1024, 64, 128),
                (64, 1024, 1024, 64, 64),
                (64, 1024, 1024, 128, 128),
                (16, 4096, 4096, 128, 128),
                (512, 256, 256, 64, 64),
            ),
            shapes_without_gpu=((4, 128, 256, 32, 64), (2, 130, 70, 24, 24)),
        ),
        Grid(
            name="gemm_gemm_gelu_tanh",
            title="Batched GEMM-GEMM, gelu_tanh",
            options=Options("gelu_tanh"),
            shapes=((64, 1024, 1024, 64, 64), (64, 1024, 1024, 128, 128)),
            shapes_without_gpu=((2, 130, 70, 24, 24),),
        ),
    ),
    operands=_gemm_gemm_operands,
    forward_flops=_gemm_gemm_flops,
    ours=functional.gemm_gemm,
    torch_expression=reference.gemm_gemm,
    operation="gemm_gemm",
    our_keywords=lambda options: {"activation": options.activation},
    torch_keywords=lambda options: {"activation": options.activation},
)
