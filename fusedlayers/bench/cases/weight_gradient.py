"""Weight and bias gradient of a linear layer."""

from __future__ import annotations

import math

from ... import functional, reference
from .case import Case, Grid, Operand, Options, Shape


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, out, width = shape
    return {"dy": Operand((rows, out)), "x": Operand((rows, width))}


WEIGHT_GRADIENT = Case(
    name="weight_gradient",
    letters=("M", "O", "K"),
    meaning="tokens × output columns × input columns",
    parameters=frozenset(),
    flags=frozenset({"bias"}),
    grids=(
        Grid(
            name="weight_gradient",
            title="Weight and bias gradient, dW = dyᵀ x and db = Σ dy",
            options=Options(bias=True),
            shapes=(
                (8192, 4096, 1024),
                (65536, 1024, 256),
                (131072, 512, 128),
                (131072, 256, 256),
                (16384, 4096, 4096),
                (65536, 512, 512),
                (262144, 128, 512),
            ),
            shapes_without_gpu=((1024, 64, 96), (130, 48, 100)),
        ),
    ),
    operands=_operands,
    forward_flops=lambda shape, options: 2 * math.prod(shape),
    ours=functional.weight_gradient,
    torch_expression=reference.weight_gradient,
    operation="weight_gradient",
    our_keywords=lambda options: {"bias": options.bias},
    torch_keywords=lambda options: {"bias": options.bias},
    results=("dw", "db"),
    backward=False,
    has_activation=False,
)
