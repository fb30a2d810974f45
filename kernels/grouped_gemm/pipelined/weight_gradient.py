"""The weight gradients of all experts on Hopper: the product of both operands over each expert's own rows.

Experts have few rows or many: a tile takes as many steps as its expert has rows. Programs take tiles in turn, forwards
and backwards, so that none of them always gets the longer ones.
"""

from ...gemm_epilogue.pipelined.products import HALF, TILE, column_halves, multiply_from, send
from ...hopper import Matrix, copy_in, fence_async_shared, gl, gluon, mbarrier, tma
from ...launching import Launch, ceil_div
from ...pipeline import init_barriers, specialize, stage_of
from ...tiles import grouped_tile
from ...tuning.grouped_gemm_pipelines import GroupedPipeline


@gluon.jit
def _first_index(consumer: gl.constexpr):
    """Which tile is a consumer's first: programs have the tiles of the second one in reverse order."""
    if consumer == 0:
        return gl.program_id(0)
    else:
        return 2 * gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def _rows_of(expert, starts_ptr, end, STEP: gl.constexpr):
    """(first row, steps) of an expert. One without rows takes a step of those past the ``end``, which are zeros."""
    first = gl.load(starts_ptr + expert)
    steps = gl.cdiv(gl.load(starts_ptr + expert + 1) - first, STEP)
    return gl.where(steps > 0, first, end), gl.maximum(steps, 1)


@gluon.jit
def _expert_of(index, order_ptr, tile_rows, tile_columns):
    expert = index // (tile_rows * tile_columns)
    if order_ptr is None:
        return expert
    else:
        return gl.load(order_ptr + expert)


@gluon.jit
def _place_of(index, tile_rows, tile_columns, GROUP: gl.constexpr):
    """(first unit, first column) of a tile."""
    inside = index % (tile_rows * tile_columns)
    unit, column = grouped_tile(inside, tile_rows, tile_columns, GROUP)
    return unit * TILE, column * TILE


@gluon.jit
def _copy_rows(
    index, left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr,
    tile_rows, tile_columns, end, position, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    first, steps = _rows_of(_expert_of(index, order_ptr, tile_rows, tile_columns), starts_ptr, end, STEP)
    unit, column = _place_of(index, tile_rows, tile_columns, GROUP)
    for step in range(steps):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        row = first + step * STEP
        copy_in(left_desc, [row, unit], full.index(stage), left_ring.index(stage * 2))
        copy_in(left_desc, [row, unit + HALF], full.index(stage), left_ring.index(stage * 2 + 1))
        copy_in(right_desc, [row, column], full.index(stage), right_ring.index(stage))
        position += 1
    return position


@gluon.jit
def _produce(
    left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows, tile_columns, work,
    end, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    other = _first_index(1)
    for index in range(_first_index(0), work, 2 * gl.num_programs(0)):
        position = _copy_rows(
            index, left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows,
            tile_columns, end, position, STEP, STAGES, GROUP,
        )  # fmt: skip
        if other < work:
            position = _copy_rows(
                other, left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows,
                tile_columns, end, position, STEP, STAGES, GROUP,
            )  # fmt: skip
        other += 2 * gl.num_programs(0)


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_desc, left_ring, right_ring, places, full, empty, turns, starts_ptr, order_ptr,
    tile_rows, tile_columns, work, units, out_rows, end,
    STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turn = 0
    sent = 0
    position = 0
    # The other consumer's tile behind each of this one's; the first one of all comes before the second consumer's.
    other = _first_index(1 - consumer)
    if consumer == 1:
        expert = _expert_of(gl.minimum(other, work - 1), order_ptr, tile_rows, tile_columns)
        _, position = _rows_of(expert, starts_ptr, end, STEP)
        other += 2 * gl.num_programs(0)
    for index in range(_first_index(consumer), work, 2 * gl.num_programs(0)):
        expert = _expert_of(index, order_ptr, tile_rows, tile_columns)
        _, steps = _rows_of(expert, starts_ptr, end, STEP)
        unit, column = _place_of(index, tile_rows, tile_columns, GROUP)
        start = gl.zeros([HALF, TILE], gl.float32, layout)
        top, bottom = multiply_from(
            consumer, position, start, start, left_ring, right_ring, full, empty, turns, turn, steps,
            True, False, STAGES,
        )  # fmt: skip
        turn += 1
        between = _expert_of(gl.minimum(other, work - 1), order_ptr, tile_rows, tile_columns)
        _, other_steps = _rows_of(between, starts_ptr, end, STEP)
        position += steps + other_steps
        other += 2 * gl.num_programs(0)
        row = expert * out_rows + unit
        left, right = column_halves(top, half_layout)
        sent = send(consumer, out_desc, row, column, left, places, sent, PLACES)
        sent = send(consumer, out_desc, row, column + HALF, right, places, sent, PLACES)
        # Behind the last unit of an expert lie those of the next one.
        if unit + HALF < units:
            left, right = column_halves(bottom, half_layout)
            sent = send(consumer, out_desc, row + HALF, column, left, places, sent, PLACES)
            sent = send(consumer, out_desc, row + HALF, column + HALF, right, places, sent, PLACES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["units", "tile_rows", "tile_columns", "work", "out_rows", "end"])
def _pipelined_grouped_weight_gradient_kernel(
    left_desc, right_desc, out_desc, starts_ptr, order_ptr, units, tile_rows, tile_columns, work, out_rows, end,
    STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = left_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    left_ring = gl.allocate_shared_memory(dtype, [STAGES * 2, STEP, HALF], left_desc.layout)
    right_ring = gl.allocate_shared_memory(dtype, [STAGES, STEP, TILE], right_desc.layout)
    places = gl.allocate_shared_memory(dtype, [2 * PLACES, HALF, HALF], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    init_barriers(full, empty, STAGES, 1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    fence_async_shared()
    specialize(2, _consume, (
        out_desc, left_ring, right_ring, places, full, empty, turns, starts_ptr, order_ptr, tile_rows, tile_columns,
        work, units, out_rows, end, STEP, STAGES, PLACES, GROUP,
    ), _produce, (
        left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows, tile_columns, work,
        end, STEP, STAGES, GROUP,
    ))  # fmt: skip


def prepare_weight_gradient(
    left: Matrix, right: Matrix, out: Matrix, experts: int, units: int, config: GroupedPipeline
) -> Launch:
    """The launch for operands of these layouts, whose gradients of all experts lie behind one another in ``out``.

    Its tensors are (left ``[rows, units]``, right ``[rows, columns]``, gradients), and beside them where the rows of
    each expert begin, and the experts in the order in which their tiles are to be computed, or None.
    """
    tile, half = TILE.value, HALF.value
    tile_rows, tile_columns = ceil_div(units, tile), ceil_div(right.columns, tile)
    work = experts * tile_rows * tile_columns
    return Launch(
        _pipelined_grouped_weight_gradient_kernel,
        min(work, config.programs),
        (units, tile_rows, tile_columns, work, out.step),
        (left.rows,),
        (config.step, config.stages, config.places, config.group),
        geometries=(
            left.geometry(config.step, half),
            right.geometry(config.step, tile),
            out.geometry(half, half),
        ),
    )
