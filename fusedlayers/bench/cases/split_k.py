"""The linear layer with few rows and columns and a long inner axis."""

from __future__ import annotations

import math

from ... import functional, reference
from .case import Case, Grid, Operand, Options, Shape


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, columns, inner = shape
    operands = {"x": Operand((rows, inner)), "weight": Operand((columns, inner), inner**-0.5)}
    return operands | ({"bias": Operand((columns,))} if options.bias else {})


SPLIT_K = Case(
    name="split_k",
    letters=("M", "N", "K"),
    meaning="rows × output columns × input columns",
    parameters=frozenset({"weight", "bias"}),
    flags=frozenset({"bias"}),
    grids=(
        Grid(
            name="split_k",
            title="Linear, few rows and columns, a long inner axis",
            options=Options(),
            shapes=(
                (64, 64, 65536),
                (16, 16, 1048576),
                (128, 128, 262144),
                (256, 256, 65536),
                (1, 4096, 4096),
                (1, 4096, 14336),
                (16, 1024, 4096),
                (16, 4096, 14336),
                (64, 4096, 4096),
                (64, 1024, 8192),
            ),
            shapes_without_gpu=((5, 24, 300), (1, 40, 700)),
        ),
    ),
    operands=_operands,
    forward_flops=lambda shape, options: 2 * math.prod(shape),
    ours=functional.linear,
    torch_expression=reference.linear,
    operation="linear",
    our_keywords=lambda options: {"activation": options.activation},
    torch_keywords=lambda options: {"activation": options.activation},
    rotating=True,
)
