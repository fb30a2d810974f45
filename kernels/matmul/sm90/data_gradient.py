"""dx on Hopper by groups of hidden units: each launch adds the contribution of a group to a float32 sum in memory.

The products of the up projection and of the gate are summed on chip. The first group initialises the sum, the last one
writes dx instead, rounded once. The epilogue reads and writes the sum while the other consumer runs its mainloop.
"""

from collections.abc import Sequence

import torch

from ...hopper import Resource, fence_async_shared, gl, gluon, matrix, resources, untransposed
from ...launching import Launch, prepared
from ...tuning import EpiloguePipeline
from .loading import Term, load_tiles
from .pingpong import dense_launch, pingpong_ring, store_tiles, zero_halves
from .ring import HALF, TILE, column_halves, make_staging, tma_store
from .roles import warp_specialize
from .schedules import dense_schedule


@resources("dx total_ptr rows columns staging FIRST LAST")
class _Sum(Resource):
    """What the epilogue reads and writes: the sum in memory, and dx, which the last group writes."""


@gluon.jit
def _accumulate(consumer: gl.constexpr, part, row, column, given, stored):
    """Add the sum in memory to half of a tile's rows, and store it back, or the last time as dx."""
    layout: gl.constexpr = part.type.layout
    its_rows = gl.expand_dims(row + gl.arange(0, HALF, gl.SliceLayout(1, layout)), 1)
    its_columns = gl.expand_dims(column + gl.arange(0, TILE, gl.SliceLayout(0, layout)), 0)
    pointers = given.total_ptr + its_rows.to(gl.int64) * given.columns + its_columns
    inside = (its_rows < given.rows) & (its_columns < given.columns)
    if not given.FIRST:
        part += gl.load(pointers, mask=inside, other=0.0)
    if given.LAST:
        left, right = column_halves(part)
        stored = tma_store(consumer, given.dx, row, column, left, given.staging, stored)
        stored = tma_store(consumer, given.dx, row, column + HALF, right, given.staging, stored)
    else:
        gl.store(pointers, part, mask=inside)
    return stored


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, top, bottom, loaded, given, stored):
    row, column, _ = tile
    stored = _accumulate(consumer, top, row, column, given, stored)
    return _accumulate(consumer, bottom, row + HALF, column, given, stored)


@gluon.jit(do_not_specialize=["tile_rows", "rows"])
def _sm90_data_gradient_kernel(
    dz_desc, up_desc, d_gate_desc, w_gate_desc, dx_desc, total_ptr, inner, columns, tile_columns, tile_rows, rows,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    GROUP: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 1 if d_gate_desc is None else 2
    schedule = dense_schedule(tile_rows, tile_columns, GROUP, TILE)
    ring = pingpong_ring(dz_desc, up_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    given = _Sum(
        dx=dx_desc, total_ptr=total_ptr, rows=rows, columns=columns, staging=make_staging(dx_desc, SLOTS), FIRST=FIRST,
        LAST=LAST,
    )  # fmt: skip
    up_term = Term(left=dz_desc, right=up_desc, other=None, inner=inner, first=0)
    gate_term = Term(left=d_gate_desc, right=w_gate_desc, other=None, inner=inner, first=0)
    fence_async_shared()
    warp_specialize(
        2, store_tiles, (zero_halves, _epilogue, ring, schedule, PARTS * gl.cdiv(inner, STEP), given),
        load_tiles, (ring, schedule, up_term, gate_term),
    )  # fmt: skip


def data_gradient(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dx: torch.Tensor,
    total: torch.Tensor,
    first: bool,
    last: bool,
    pipeline: EpiloguePipeline,
    ready: dict[object, object] | None = None,
) -> bool:
    """Add ``Σ d_pre @ weight`` to the total: one term, or with a gate two, of d_pre ``[M, n]``, weight ``[n, K]``.

    The ``first`` group initialises the total, float32 and contiguous ``[M, K]``; the ``last`` one reads it and writes
    dx instead, in the operands' dtype. Weights may be transposed, if all are. Returns False, without computing, if TMA
    cannot read an operand. ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``).
    """
    made = prepared(ready, ("data gradient", first, last), _prepare, terms, dx, first, last, pipeline)
    if made is None:
        return False
    factors = [factor for term in terms for factor in term]
    made((*factors, *[None] * (4 - len(factors)), dx, total))
    return True


def _prepare(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dx: torch.Tensor,
    first: bool,
    last: bool,
    pipeline: EpiloguePipeline,
) -> Launch | None:
    found = [(untransposed(d_pre), matrix(weight)) for d_pre, weight in terms]
    complete = [(left, right) for left, right in found if left is not None and right is not None]
    out = untransposed(dx)
    if len(complete) < len(found) or out is None or len({right.transposed for _, right in complete}) > 1:
        return None
    return dense_launch(_sm90_data_gradient_kernel, complete, out, pipeline, (first, last), most_terms=2)
