"""Weight and bias gradient of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options, Shape
from .trial import Trial


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, out, width = shape
    return {"dy": Operand((rows, out)), "x": Operand((rows, width))}


def _trials(device: Device) -> Iterator[Trial]:
    for bias in (False, True):
        if device.backend != GENERIC:
            for shape in ((1000, 64, 136), (1024, 128, 64), (1000, 136, 264), (512, 128, 1024), (1000, 520, 128)):
                for dtype in ("bf16", "fp16"):
                    yield Trial("weight_gradient", Options(bias=bias), shape, dtype, "few")
        for dtype in DTYPES:
            yield Trial("weight_gradient", Options(bias=bias), (1000, 127, 200), dtype, "generic")


CASE = Case(
    name="weight_gradient",
    operation="weight_gradient",
    place=5,
    letters=("M", "O", "K"),
    meaning="tokens × output columns × input columns",
    grids=(
        Grid(
            "weight_gradient", "Weight and bias gradient, dW = dyᵀ x and db = Σ dy", Options(bias=True),
            (
                (8192, 4096, 1024), (65536, 1024, 256), (131072, 512, 128), (131072, 256, 256), (16384, 4096, 4096),
                (65536, 512, 512), (262144, 128, 512),
            ),
            ((1024, 64, 96), (130, 48, 100)),
        ),
    ),
    flags=frozenset({"bias"}),
    has_activation=False,
    operands=_operands,
    keywords=lambda options: {"bias": options.bias},
    ours=functional.weight_gradient,
    torch_expression=reference.weight_gradient,
    results=("dw", "db"),
    backward=False,
    trials=_trials,
    few_trials=(Trial("weight_gradient", Options(bias=True), (37, 24, 40), "fp16"),),
)  # fmt: skip
