"""Late interaction: all pairs of queries and documents."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import Case, Grid, Operand, Options, Shape, one_product
from .trial import Trial

# (queries, documents, query tokens, document tokens) of the trials, and their widths.
_PAIRS = (
    (1, 9, 32, 40),
    (4, 9, 32, 40),
    (2, 5, 50, 300),
    (20, 3, 30, 72),
    (5, 3, 32, 600),
    (1, 9, 56, 600),
    (1, 9, 32, 72),
)
_PORTABLE_WIDTHS = (16, 24, 64, 128, 256, 1000)


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    queries, documents, query_length, document_length, width = shape
    return {
        "queries": Operand((queries, query_length, width)),
        "documents": Operand((documents, document_length, width), width**-0.5),
    }


def _trials(device: Device) -> Iterator[Trial]:
    if device.backend != GENERIC:
        for sizes in _PAIRS:
            for width in (64, 128):
                for backward in (False, True):
                    yield Trial("maxsim", Options(), (*sizes, width), "fp16", "few", backward)
    for width in _PORTABLE_WIDTHS:
        for dtype in ("fp16", "fp32"):
            yield Trial("maxsim", Options(), (7, 13, 31, 130, width), dtype, "generic")


CASE = Case(
    name="maxsim",
    operation="maxsim",
    place=3,
    letters=("Q", "D", "Lq", "Ld", "d"),
    meaning="queries × documents × query tokens × document tokens × width",
    grids=(
        Grid(
            "maxsim", "MaxSim", Options(),
            ((1, 10_000, 32, 300, 128), (128, 128, 32, 300, 128), (32, 32, 1024, 1024, 128)),
            ((4, 6, 8, 30, 32), (3, 5, 7, 33, 24)),
        ),
    ),
    has_activation=False,
    operands=_operands,
    keywords=lambda options: {},
    ours=functional.maxsim,
    torch_expression=reference.maxsim,
    # The gradients add up the chosen tokens alone: no further product is needed.
    backward_flops=lambda shape, options: 2 * one_product(shape, options) // shape[3],
    trials=_trials,
    few_trials=(Trial("maxsim", Options(), (3, 4, 5, 33, 24), "fp16"),),
)  # fmt: skip
