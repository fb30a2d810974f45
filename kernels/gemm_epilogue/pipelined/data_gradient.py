"""The part of dx that comes through a group of hidden units, added to the float32 sum of those before it, on Hopper.

The products of a gate and of what it multiplies are one sum on chip. The first group begins the sum in memory, the last
one leaves dx itself, rounded once. Reading and writing the sum is an epilogue: it takes place while the other consumer
multiplies.
"""

from collections.abc import Sequence

import torch

from ...hopper import fence_async_shared, gl, gluon, matrix, tma, untransposed
from ...launching import Launch, prepared
from ...pipeline import specialize
from ...tiles import grouped_tile
from ...tuning import EpiloguePipeline
from .products import HALF, TILE, column_halves, columns_at_once, copy_tile, make_ring, multiply, send


@gluon.jit
def _copy_terms(
    dz_desc, up_desc, d_gate_desc, w_gate_desc, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
        tile_row, tile_column = grouped_tile(index, tile_rows, tile_columns, GROUP)
        row = tile_row * TILE
        column = tile_column * TILE
        position = copy_tile(
            dz_desc, up_desc, None, left_ring, right_ring, full, empty, row, column, inner, position, 0,
            RIGHT_TRANSPOSED, STEP, STAGES,
        )  # fmt: skip
        if d_gate_desc is not None:
            position = copy_tile(
                d_gate_desc, w_gate_desc, None, left_ring, right_ring, full, empty, row, column, inner, position, 0,
                RIGHT_TRANSPOSED, STEP, STAGES,
            )  # fmt: skip


@gluon.jit
def _finish(
    consumer: gl.constexpr, part, row, column, rows, columns, dx_desc, total_ptr, places, sent,
    FIRST: gl.constexpr, LAST: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Adds half of a tile, all of its columns, to the sum in memory, or the sum to it."""
    layout: gl.constexpr = part.type.layout
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    its_rows = gl.expand_dims(row + gl.arange(0, HALF, gl.SliceLayout(1, layout)), 1)
    its_columns = gl.expand_dims(column + gl.arange(0, TILE, gl.SliceLayout(0, layout)), 0)
    pointers = total_ptr + its_rows.to(gl.int64) * columns + its_columns
    inside = (its_rows < rows) & (its_columns < columns)
    if not FIRST:
        part += gl.load(pointers, mask=inside, other=0.0)
    if LAST:
        left, right = column_halves(part, half_layout)
        sent = send(consumer, dx_desc, row, column, left, places, sent, PLACES)
        sent = send(consumer, dx_desc, row, column + HALF, right, places, sent, PLACES)
    else:
        gl.store(pointers, part, mask=inside)
    return sent


@gluon.jit
def _consume(
    consumer: gl.constexpr, dx_desc, total_ptr, left_ring, right_ring, places, full, empty, turns, tile_rows,
    tile_columns, steps, rows, columns,
    RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    turn = 0
    sent = 0
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_rows * tile_columns, 2 * gl.num_programs(0)):
        tile_row, tile_column = grouped_tile(index, tile_rows, tile_columns, GROUP)
        row = tile_row * TILE
        column = tile_column * TILE
        start = gl.zeros([HALF, TILE], gl.float32, layout)
        top, bottom = multiply(
            consumer, start, start, left_ring, right_ring, full, empty, turns, turn, steps, RIGHT_TRANSPOSED, STAGES
        )
        turn += 1
        sent = _finish(consumer, top, row, column, rows, columns, dx_desc, total_ptr, places, sent, FIRST, LAST, PLACES)
        sent = _finish(
            consumer, bottom, row + HALF, column, rows, columns, dx_desc, total_ptr, places, sent, FIRST, LAST, PLACES
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tile_rows", "rows"])
def _pipelined_data_gradient_kernel(
    dz_desc, up_desc, d_gate_desc, w_gate_desc, dx_desc, total_ptr, inner, columns, tile_columns, tile_rows, rows,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 1 if d_gate_desc is None else 2
    steps = PARTS * gl.cdiv(inner, STEP)
    left_ring, right_ring, full, empty, turns = make_ring(dz_desc, up_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    places = gl.allocate_shared_memory(dz_desc.dtype, [2 * PLACES, HALF, HALF], dx_desc.layout)
    fence_async_shared()
    specialize(2, _consume, (
        dx_desc, total_ptr, left_ring, right_ring, places, full, empty, turns, tile_rows, tile_columns, steps, rows,
        columns, RIGHT_TRANSPOSED, STAGES, PLACES, GROUP, FIRST, LAST,
    ), _copy_terms, (
        dz_desc, up_desc, d_gate_desc, w_gate_desc, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
        RIGHT_TRANSPOSED, STEP, STAGES, GROUP,
    ))  # fmt: skip


def data_gradient(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dx: torch.Tensor,
    total: torch.Tensor,
    first: bool,
    last: bool,
    pipeline: EpiloguePipeline,
    ready: dict[object, object] | None = None,
) -> bool:
    """Adds ``Σ d_pre @ weight`` to the total: one term, or with a gate two, of d_pre ``[M, n]``, weight ``[n, K]``.

    The ``first`` group begins the total, float32 and contiguous ``[M, K]``; the ``last`` one reads it and fills dx, of
    the operands' dtype, instead. Weights may be transposed, all of them. False where an operand does not lie as TMA
    wants it: nothing is computed then. ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``).
    """
    made = prepared(ready, ("data gradient", first, last), _prepare, terms, dx, first, last, pipeline)
    if made is None:
        return False
    factors = [factor for term in terms for factor in term]
    made((total,), (*factors, *[None] * (4 - len(factors)), dx))
    return True


def _prepare(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dx: torch.Tensor,
    first: bool,
    last: bool,
    pipeline: EpiloguePipeline,
) -> Launch | None:
    operands = [found for d_pre, weight in terms for found in (untransposed(d_pre), matrix(weight))]
    complete = [each for each in operands if each is not None]
    out = untransposed(dx)
    if len(complete) < len(operands) or out is None or len({each.transposed for each in complete[1::2]}) > 1:
        return None
    tile, half = TILE.value, HALF.value
    tile_rows, tile_columns = -(-out.rows // tile), -(-out.columns // tile)
    transposed = complete[1].transposed
    right_block = (pipeline.step, columns_at_once(transposed))
    factors = [
        each.geometry(*right_block) if place % 2 else each.geometry(half, pipeline.step)
        for place, each in enumerate(complete)
    ]
    return Launch(
        _pipelined_data_gradient_kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (complete[0].columns, out.columns, tile_columns),
        (tile_rows, out.rows),
        (transposed, pipeline.step, pipeline.stages, pipeline.places, pipeline.group, first, last),
        geometries=(*factors, *[None] * (4 - len(factors)), out.geometry(half, half)),
    )
