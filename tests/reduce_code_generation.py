"""Compiles what calls of ``gemm_reduce`` would launch, forward and backward; see ``code_generation.py``.

Run as a script it prints one JSON object per kernel:

    python tests/reduce_code_generation.py rows sm_90/bfloat16 sm_80/float16
    python tests/reduce_code_generation.py few gfx942/bfloat16
    python tests/reduce_code_generation.py sm90 sm_90/bfloat16
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from code_generation import compiling_for  # sets the switches before Triton and the library are imported

from fusedlayers import functional


@dataclass(frozen=True)
class ReduceCase:
    """One training step of ``gemm_reduce``: a ``[batch, rows, width]``, b ``[batch, width, columns]``.

    ``sm90`` lets the warp-specialised kernel run, of operands whose rows lie behind one another in memory, or
    ``transposed``. Without ``training`` there is no backward pass, and no index is found. ``packed`` is a ``maxsim`` of
    ``rows`` query tokens with ``batch`` documents of ``columns`` tokens, behind one another. Of an sm90 case the
    other kernels are not compiled.
    """

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
    sm90: bool = False
    transposed: bool = False
    training: bool = True
    packed: bool = False
    gated: bool = False  # for the lint, which knows kernels with gates


def compile_case(case: ReduceCase) -> list[dict[str, Any]]:
    """A report for every launch of the case; a launch that repeats is reported once."""
    dtype = getattr(torch, case.dtype)

    def operand(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=case.training)

    a, b = operand(case.batch, case.rows, case.width), operand(case.batch, case.width, case.columns)
    if case.sm90:
        # The rows of either side lie transposed, or neither.
        a = operand(case.batch, case.width, case.rows).mT if case.transposed else a
        b = b if case.transposed else operand(case.batch, case.columns, case.width).mT
    mask = torch.empty(case.batch, case.rows if case.dim == -2 else case.columns, dtype=torch.bool)
    with compiling_for(case.target, ("sm90_reduce",) if case.sm90 else None, case.sm90) as reports:
        if case.packed:
            ends = torch.arange(case.batch + 1) * case.columns
            tokens = operand(case.batch * case.columns, case.width)
            d = functional.maxsim(operand(1, case.rows, case.width), tokens, cu_seqlens_documents=ends)
        else:
            d = functional.gemm_reduce(
                a, b, op=case.op, dim=case.dim, activation=case.activation, mask=mask if case.masked else None,
                bias=operand(case.columns) if case.bias else None,
            )  # fmt: skip
        if case.training:
            d.backward(torch.empty_like(d))
    different = {json.dumps(report): report for report in reports}
    return [asdict(case) | report for report in different.values()]


def shipped(selection: str, target: str, dtype: str) -> Iterator[ReduceCase]:
    """Every row of the tables ("few": some) for both axes, the costliest options, ragged sizes, and splits."""
    if selection == "few":
        yield ReduceCase(target, dtype, 64, "max", -2, rows=1021)
        yield ReduceCase(target, dtype, 256, "logsumexp", -1)
        yield ReduceCase(target, dtype, 1024, "max", -1, masked=True, rows=256, columns=9000, batch=1)
        yield ReduceCase(target, dtype, 64, "logsumexp", -1, rows=61, columns=1208)
        return
    if selection == "sm90":
        yield from sm90(target, dtype)
        return
    for dim in (-2, -1):
        for width in (16, 64, 128, 256, 1024):
            # Over either axis in turn: the axes differ in which operand lies transposed.
            if width == 128 or dim == -2:
                yield ReduceCase(target, dtype, width, "max", dim)
            if width == 128 or dim == -1:
                yield ReduceCase(target, dtype, width, "logsumexp", dim)
        yield ReduceCase(target, dtype, 128, "sumsq", dim, activation="gelu", bias=True)
        yield ReduceCase(target, dtype, 125, "logsumexp", dim, rows=1021, columns=1019, masked=True)
        yield ReduceCase(target, dtype, 61, "absmax", dim, activation="silu", rows=1021, columns=1019, bias=True)
        yield ReduceCase(target, dtype, 64, "min", dim, rows=9000, columns=9000, batch=1)
        yield ReduceCase(target, dtype, 64, "mean", dim, activation="relu", rows=16384, columns=64, batch=1)
    # Both gradients at once, where few rows are kept: whole blocks, whole vectors, and neither.
    for kept, width, reduced in itertools.product((20, 61, 120), (24, 64, 128), (1024, 1208, 1021)):
        # Each with one layout, and one with a mask.
        one = ReduceCase(target, dtype, width, "logsumexp", -1, rows=kept, columns=reduced, masked=reduced == 1021)
        across = replace(one, dim=-2, rows=reduced, columns=kept)
        yield one if width == 64 else across
    # About as many entries as SMs, and more.
    for batch, width, masked in itertools.product((120, 200), (88, 128), (False, True)):
        many = ReduceCase(target, dtype, width, "logsumexp", -1, batch=batch, rows=61, columns=1208, masked=masked)
        yield many
        yield replace(many, dim=-2, rows=1208, columns=61)


def sm90(target: str, dtype: str) -> Iterator[ReduceCase]:
    """Every number of consumers and size of a block, with and without indices and masks, in either layout."""
    sizes = [(56, 16), (128, 304), (504, 304), (304, 1000), (104, 600)]
    for number, (kept, reduced) in enumerate(sizes):
        # Each size with both operations and both layouts, each operation with each layout at every other size.
        for width, transposed in ((64, True), (128, False)):
            plain = ReduceCase(
                target, dtype, width, "max", -1, rows=kept, columns=reduced, sm90=True, transposed=transposed,
                training=False,
            )  # fmt: skip
            yield replace(plain, op="max" if transposed == (number % 2 == 0) else "logsumexp")
    for kept, reduced in ((104, 128), (500, 300)):
        wide = replace(plain, rows=kept, columns=reduced)
        yield from (replace(wide, op=op, masked=True) for op in ("logsumexp", "sumsq"))
        yield replace(wide, op="absmax", training=True, width=72)
        # Transposed entries, of which each has an axis of its own.
        yield replace(wide, op="max", width=72, rows=kept // 8 * 8, columns=reduced // 8 * 8, transposed=True)
        yield replace(wide, op="max", training=True, masked=True)
        # Split.
        yield replace(wide, op="max", training=True, batch=1, columns=9000 + reduced)
        yield replace(wide, op="logsumexp", batch=1, columns=9000 + reduced)
        yield replace(wide, packed=True)
        yield replace(wide, packed=True, training=True)
    yield from (replace(wide, op=op) for op in ("sum", "mean", "min", "absmax", "sumsq"))


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        for case in shipped(sys.argv[1], *chosen.split("/")):
            for report in compile_case(case):
                print(json.dumps(report), flush=True)
