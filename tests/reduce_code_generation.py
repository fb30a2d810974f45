"""Compiles what calls of ``gemm_reduce`` would launch, forward and backward; see ``code_generation.py``.

Run as a script it prints one JSON object per kernel:

    python tests/reduce_code_generation.py rows sm_90/bfloat16 sm_80/float16
    python tests/reduce_code_generation.py few gfx942/bfloat16
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from code_generation import compiling_for  # sets the switches before Triton and the library are imported

from fusedlayers import functional


@dataclass(frozen=True)
class ReduceCase:
    """One training step of ``gemm_reduce``: a ``[batch, rows, width]``, b ``[batch, width, columns]``."""

    target: str
    dtype: str
    width: int
    op: str
    dim: int
    activation: str = "identity"
    rows: int = 1024
    columns: int = 1024
    batch: int = 64
    masked: bool = False
    bias: bool = False
    gated: bool = False  # for the lint, which knows kernels with gates


def compile_case(case: ReduceCase) -> list[dict[str, Any]]:
    """A report for every launch of the case; a launch that repeats is reported once."""
    dtype = getattr(torch, case.dtype)

    def operand(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    a, b = operand(case.batch, case.rows, case.width), operand(case.batch, case.width, case.columns)
    mask = torch.empty(case.batch, case.rows if case.dim == -2 else case.columns, dtype=torch.bool)
    with compiling_for(case.target) as reports:
        d = functional.gemm_reduce(
            a, b, op=case.op, dim=case.dim, activation=case.activation, mask=mask if case.masked else None,
            bias=operand(case.columns) if case.bias else None,
        )  # fmt: skip
        d.backward(torch.empty_like(d))
    different = {json.dumps(report): report for report in reports}
    return [asdict(case) | report for report in different.values()]


def shipped(selection: str, target: str, dtype: str) -> Iterator[ReduceCase]:
    """Every row of the tables ("few": some) for both axes, the costliest options, ragged sizes, and splits."""
    if selection == "few":
        yield ReduceCase(target, dtype, 64, "max", -2, rows=1021)
        yield ReduceCase(target, dtype, 256, "logsumexp", -1)
        yield ReduceCase(target, dtype, 1024, "max", -1, masked=True, rows=256, columns=9000, batch=1)
        return
    for dim in (-2, -1):
        for width in (16, 64, 128, 256, 1024):
            yield ReduceCase(target, dtype, width, "max", dim)
            yield ReduceCase(target, dtype, width, "logsumexp", dim)
        yield ReduceCase(target, dtype, 128, "sumsq", dim, activation="gelu", bias=True)
        yield ReduceCase(target, dtype, 125, "logsumexp", dim, rows=1021, columns=1019, masked=True)
        yield ReduceCase(target, dtype, 61, "absmax", dim, activation="silu", rows=1021, columns=1019, bias=True)
        yield ReduceCase(target, dtype, 64, "min", dim, rows=9000, columns=9000, batch=1)
        yield ReduceCase(target, dtype, 64, "mean", dim, activation="relu", rows=16384, columns=64, batch=1)


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        for case in shipped(sys.argv[1], *chosen.split("/")):
            for report in compile_case(case):
                print(json.dumps(report), flush=True)
