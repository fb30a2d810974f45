"""The sums of the rows of a matrix."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options
from .trial import Trial


def _trials(device: Device) -> Iterator[Trial]:
    for dtype in DTYPES:
        yield Trial("row_sums", Options(), (1061, 488), dtype)


CASE = Case(
    name="row_sums",
    letters=("M", "N"),
    meaning="rows × columns",
    grids=(Grid("row_sums", "Sums of rows", Options(), ((65536, 4096),), ((130, 70),)),),
    operands=lambda shape, options: {"x": Operand(shape)},
    forward_flops=lambda shape, options: shape[0] * shape[1],
    ours=functional.row_sums,
    torch_expression=reference.row_sums,
    operation="row_sums",
    keywords=lambda options: {},
    has_activation=False,
    trials=_trials,
    few_trials=(Trial("row_sums", Options(), (37, 40), "fp16"),),
    place=8,
)
