"""The part of dx that comes through a group of hidden units, added to the sum of those before it, on Hopper.

A warp of its own copies that sum, a quarter of a tile at a time, while the product is computed. The sum leaves the way
it came (``carrying``); after the last group rounded, without the bits beyond.
"""

from ...hopper import Matrix, copy_in, copy_out, fence_async_shared, gl, gluon, mbarrier, tma
from ...launching import launch
from ...pipeline import init_barriers, stage_of
from ...tiles import grouped_tile
from ...tuning import CONSUMER_ROWS, EpiloguePipeline
from ..carrying import carried, paired, restored, unpaired
from .products import HALF, TILE, column_halves, columns_at_once, copy_tile, make_ring, multiply, send

# Bytes of the bits beyond 16 in a row of an epilogue's tile: two columns in each.
PAIRS = gl.constexpr(CONSUMER_ROWS // 2)


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
            dz_desc, up_desc, None, left_ring, right_ring, full, empty, row, column, inner, position,
            RIGHT_TRANSPOSED, STEP, STAGES,
        )  # fmt: skip
        if d_gate_desc is not None:
            position = copy_tile(
                d_gate_desc, w_gate_desc, None, left_ring, right_ring, full, empty, row, column, inner, position,
                RIGHT_TRANSPOSED, STEP, STAGES,
            )  # fmt: skip


@gluon.jit
def _copy_sums(
    dx_desc, rest_desc, tiles, rest_tiles, full, empty, tile_rows, tile_columns,
    FIRST: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    if not FIRST:
        count = 0
        for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
            tile_row, tile_column = grouped_tile(index, tile_rows, tile_columns, GROUP)
            for quarter in gl.static_range(4):
                stage, phase = stage_of(count // 2 * 4 + quarter, STAGES)
                stage += count % 2 * STAGES
                row = tile_row * TILE + quarter // 2 * HALF
                column = tile_column * 2 + quarter % 2
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full.index(stage), dx_desc.block_type.nbytes + rest_desc.block_type.nbytes)
                copy_in(dx_desc, [row, column * HALF], full.index(stage), tiles.index(stage))
                copy_in(rest_desc, [row, column * PAIRS], full.index(stage), rest_tiles.index(stage))
            count += 1


@gluon.jit
def _finish(
    consumer: gl.constexpr, total, row, column, dx_desc, rest_desc, tiles, rest_tiles, full, empty, position, places,
    rest_places, sent, zero, FIRST: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Adds what was carried to a quarter of a tile, and sends it on its way."""
    layout: gl.constexpr = total.type.layout
    # Where a thread has the bits of its pairs of columns.
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [HALF, PAIRS],
    )  # fmt: skip
    if FIRST:
        # ptxas would have integer operations on the sum wait between the products, and serialise these.
        total += zero
    else:
        stage, phase = stage_of(position, STAGES)
        stage += consumer * STAGES
        mbarrier.wait(full.index(stage), phase)
        even, odd = unpaired(rest_tiles.index(stage).load(pairs))
        rest = gl.convert_layout(gl.join(even, odd).reshape([HALF, HALF]), layout, assert_trivial=True)
        total += restored(tiles.index(stage).load(layout), rest)
    if LAST:
        sent = send(consumer, dx_desc, row, column, total, places, sent, PLACES)
    else:
        rounded, rest = carried(total, places.dtype)
        even, odd = rest.reshape([HALF, PAIRS, 2]).split()
        both = gl.convert_layout(paired(even, odd), pairs, assert_trivial=True)
        # Two copies for each place: all but those that were sent last have left theirs.
        tma.store_wait(2 * (PLACES - 1))
        index = consumer * PLACES + sent % PLACES
        places.index(index).store(rounded)
        rest_places.index(index).store(both)
        fence_async_shared()
        copy_out(dx_desc, [row, column], places.index(index))
        copy_out(rest_desc, [row, column // 2], rest_places.index(index))
        sent += 1
    if not FIRST:
        # Only now: the next copy must not overtake a read that is still under way.
        mbarrier.arrive(empty.index(stage))
    return sent


@gluon.jit
def _consume(
    consumer: gl.constexpr, dx_desc, rest_desc, left_ring, right_ring, tiles, rest_tiles, places, rest_places,
    full, empty, tile_full, tile_empty, turns, tile_rows, tile_columns, steps, zero,
    RIGHT_TRANSPOSED: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, STAGES: gl.constexpr,
    SUM_STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turn = 0
    sent = 0
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_rows * tile_columns, 2 * gl.num_programs(0)):
        tile_row, tile_column = grouped_tile(index, tile_rows, tile_columns, GROUP)
        column = tile_column * TILE
        start = gl.zeros([HALF, TILE], gl.float32, layout)
        top, bottom = multiply(
            consumer, start, start, left_ring, right_ring, full, empty, turns, turn, steps, RIGHT_TRANSPOSED, STAGES
        )
        for half in gl.static_range(2):
            if half == 0:
                left, right = column_halves(top, half_layout)
            else:
                left, right = column_halves(bottom, half_layout)
            row = tile_row * TILE + half * HALF
            sent = _finish(
                consumer, left, row, column, dx_desc, rest_desc, tiles, rest_tiles, tile_full, tile_empty,
                4 * turn + 2 * half, places, rest_places, sent, zero, FIRST, LAST, SUM_STAGES,
                PLACES,
            )  # fmt: skip
            sent = _finish(
                consumer, right, row, column + HALF, dx_desc, rest_desc, tiles, rest_tiles, tile_full, tile_empty,
                4 * turn + 2 * half + 1, places, rest_places, sent, zero, FIRST, LAST, SUM_STAGES,
                PLACES,
            )  # fmt: skip
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tile_rows", "zero"])
def _pipelined_carried_gradient_kernel(
    dz_desc, up_desc, d_gate_desc, w_gate_desc, dx_desc, rest_desc, inner, tile_columns, tile_rows, zero,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SUM_STAGES: gl.constexpr,
    PLACES: gl.constexpr, GROUP: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    # ``zero`` is 0, which only the caller knows.
    dtype: gl.constexpr = dz_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    PARTS: gl.constexpr = 1 if d_gate_desc is None else 2
    steps = PARTS * gl.cdiv(inner, STEP)
    left_ring, right_ring, full, empty, turns = make_ring(dz_desc, up_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    tiles = gl.allocate_shared_memory(dtype, [2 * SUM_STAGES, HALF, HALF], dx_desc.layout)
    places = gl.allocate_shared_memory(dtype, [2 * PLACES, HALF, HALF], dx_desc.layout)
    rest_tiles = gl.allocate_shared_memory(gl.int8, [2 * SUM_STAGES, HALF, PAIRS], rest_desc.layout)
    rest_places = gl.allocate_shared_memory(gl.int8, [2 * PLACES, HALF, PAIRS], rest_desc.layout)
    tile_full = gl.allocate_shared_memory(gl.int64, [2 * SUM_STAGES, 1], barrier)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2 * SUM_STAGES, 1], barrier)
    init_barriers(tile_full, tile_empty, 2 * SUM_STAGES, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            gl.constexpr(0), dx_desc, rest_desc, left_ring, right_ring, tiles, rest_tiles, places, rest_places,
            full, empty, tile_full, tile_empty, turns, tile_rows, tile_columns, steps, zero,
            RIGHT_TRANSPOSED, FIRST, LAST, STAGES, SUM_STAGES, PLACES, GROUP,
        )),
        (_consume, (
            gl.constexpr(1), dx_desc, rest_desc, left_ring, right_ring, tiles, rest_tiles, places, rest_places,
            full, empty, tile_full, tile_empty, turns, tile_rows, tile_columns, steps, zero,
            RIGHT_TRANSPOSED, FIRST, LAST, STAGES, SUM_STAGES, PLACES, GROUP,
        )),
        (_copy_terms, (
            dz_desc, up_desc, d_gate_desc, w_gate_desc, left_ring, right_ring, full, empty, tile_rows, tile_columns,
            inner, RIGHT_TRANSPOSED, STEP, STAGES, GROUP,
        )),
        (_copy_sums, (
            dx_desc, rest_desc, tiles, rest_tiles, tile_full, tile_empty, tile_rows, tile_columns,
            FIRST, SUM_STAGES, GROUP,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def launch_data_gradient(
    operands: list[Matrix],
    dx: Matrix,
    rest: Matrix,
    first: bool,
    last: bool,
    pipeline: EpiloguePipeline,
) -> None:
    """Adds the products of ``operands``, d_pre and weight after one another, to dx and ``rest``."""
    tile, half = TILE.value, HALF.value
    tile_rows, tile_columns = -(-dx.rows // tile), -(-dx.columns // tile)
    transposed = operands[1].transposed
    right_block = (pipeline.step, columns_at_once(transposed))
    factors = [
        each.descriptor(*right_block) if place % 2 else each.descriptor(half, pipeline.step)
        for place, each in enumerate(operands)
    ]
    launch(
        _pipelined_carried_gradient_kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (),
        (operands[0].columns, tile_columns),
        (tile_rows, 0.0),
        (transposed, pipeline.step, pipeline.stages, pipeline.z_stages, pipeline.places, pipeline.group, first, last),
        descriptors=(
            *factors, *[None] * (4 - len(factors)), dx.descriptor(half, half), rest.descriptor(half, PAIRS.value),
        ),
    )  # fmt: skip
