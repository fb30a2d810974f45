"""The linear layer with few rows and columns and a long inner axis."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options, Shape
from .trial import Trial

# (rows, columns, inner width) of the trials: every tile of the product and of its data gradient, each split.
_SHAPES = (
    (1, 16, 8192),
    (1, 2048, 2048),
    (1, 4096, 1032),
    (16, 16, 4096),
    (16, 32, 4104),
    (16, 200, 2056),
    (40, 16, 2056),
    (32, 64, 4096),
    (64, 200, 2056),
    (64, 1024, 2056),
    (64, 4096, 1032),
    (200, 64, 1032),
    (200, 1024, 64),
)
_ODD_SHAPES = ((1, 15, 1001), (16, 61, 1001), (65, 127, 1001))


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, columns, inner = shape
    operands = {"x": Operand((rows, inner)), "weight": Operand((columns, inner), inner**-0.5)}
    return operands | ({"bias": Operand((columns,))} if options.bias else {})


def _trials(device: Device) -> Iterator[Trial]:
    plain, biased = Options(), Options(bias=True)
    for shape in _SHAPES:
        yield Trial("split_k", biased, shape, "bf16")
        yield Trial("split_k", plain, shape, "fp16")
        # While gradients are wanted the activation is torch's.
        yield Trial("split_k", Options("relu", bias=True), shape, "bf16", backward=False)
    for shape in _ODD_SHAPES:
        for dtype in DTYPES:
            yield Trial("split_k", biased, shape, dtype, "generic")


CASE = Case(
    name="split_k",
    operation="linear",
    place=6,
    letters=("M", "N", "K"),
    meaning="rows × output columns × input columns",
    grids=(
        Grid(
            "split_k", "Linear, few rows and columns, a long inner axis", Options(),
            (
                (64, 64, 65536), (16, 16, 1048576), (128, 128, 262144), (256, 256, 65536), (1, 4096, 4096),
                (1, 4096, 14336), (16, 1024, 4096), (16, 4096, 14336), (64, 4096, 4096), (64, 1024, 8192),
            ),
            ((5, 24, 300), (1, 40, 700)),
        ),
    ),
    flags=frozenset({"bias"}),
    operands=_operands,
    parameters=frozenset({"weight", "bias"}),
    ours=functional.linear,
    torch_expression=reference.linear,
    rotating=True,
    trials=_trials,
    few_trials=(
        Trial("split_k", Options(bias=True), (1, 40, 700), "fp16"),
        Trial("split_k", Options("relu", bias=True), (5, 24, 300), "fp32", backward=False),
    ),
)  # fmt: skip
