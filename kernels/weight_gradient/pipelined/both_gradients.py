"""dW and db on Hopper: one warp copies rows of dy and x, two consumers multiply them, and some more warps sum up dy.

Programs are persistent: the copies of a tile start while the one before is still being stored. The sums of dy are taken
from the stages that the products read, by warps of their own: the matrix units have no more to do.
"""

import torch

from ...hopper import (
    Matrix,
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...pipeline import init_barriers, release_after_load, stage_of
from ...tuning import WeightGradientPipeline


@gluon.jit
def _work(index, units, width, M, splits, TILE: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
          GROUP: gl.constexpr):  # fmt: skip
    """(split, first unit, first column, first row, end row) of the ``index``-th piece of work.

    Splits lie behind one another. Within one, ``GROUP`` tiles below one another come before those to their right:
    programs that run at once read few columns of both sides, so that the cache serves them.
    """
    unit_tiles = gl.cdiv(units, TILE)
    column_tiles = gl.cdiv(width, COLUMNS)
    split = index // (unit_tiles * column_tiles)
    tile = index % (unit_tiles * column_tiles)
    first = tile // (GROUP * column_tiles) * GROUP
    height = gl.minimum(GROUP, unit_tiles - first)
    inside = tile - first * column_tiles
    split_rows = gl.cdiv(gl.cdiv(M, ROWS), splits) * ROWS
    first_row = split * split_rows
    end_row = gl.minimum(first_row + split_rows, M)
    return split, (first + inside % height) * TILE, inside // height * COLUMNS, first_row, end_row


@gluon.jit
def _produce(
    dy_desc, x_desc, left_ring, right_ring, full, empty, units, width, M, splits, work,
    UNITS: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        _, unit, column, first_row, end_row = _work(
            index, units, width, M, splits, UNITS * CONSUMERS, COLUMNS, ROWS, GROUP
        )
        for row in range(first_row, end_row, ROWS):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), CONSUMERS * dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            for consumer in gl.static_range(CONSUMERS):
                tile = left_ring.index(stage * CONSUMERS + consumer)
                copy_in(dy_desc, [row, unit + consumer * UNITS], full.index(stage), tile)
            copy_in(x_desc, [row, column], full.index(stage), right_ring.index(stage))
            position += 1


@gluon.jit
def _consume(
    consumer: gl.constexpr, dw_ptr, left_ring, right_ring, full, empty, stride_split, units, width, M, splits, work,
    UNITS: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, UNITS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    position = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        split, unit, column, first_row, end_row = _work(
            index, units, width, M, splits, UNITS * CONSUMERS, COLUMNS, ROWS, GROUP
        )
        acc = gl.zeros([UNITS, COLUMNS], gl.float32, layout)
        for row in range(first_row, end_row, ROWS):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(full.index(stage), phase)
            left = left_ring.index(stage * CONSUMERS + consumer).permute((1, 0))
            acc = warpgroup_mma(left, right_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            if row > first_row:
                mbarrier.arrive(empty.index((position - 1) % STAGES))
            position += 1
        acc = warpgroup_mma_wait(0, [acc])
        if first_row < end_row:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        unit += consumer * UNITS
        inside = gl.expand_dims(rows < units - unit, 1) & gl.expand_dims(columns < width - column, 0)
        offsets = gl.expand_dims(rows.to(gl.int64) * width, 1) + gl.expand_dims(columns, 0)
        target = dw_ptr + (split.to(gl.int64) * stride_split + unit.to(gl.int64) * width + column)
        gl.store(target + offsets, acc.to(dw_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _sum(
    db_ptr, left_ring, full, empty, stride_split, units, width, M, splits, work,
    UNITS: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums of dy over the rows, stored by the programs of the first column of tiles."""
    LANES: gl.constexpr = UNITS // 8
    # The pattern of a stage in memory repeats after 8 rows: as many, or twice as many, are in registers at once.
    SUM_ROWS: gl.constexpr = WARPS * (32 // LANES)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    columns = gl.arange(0, UNITS, gl.SliceLayout(0, layout))
    position = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        split, unit, column, first_row, end_row = _work(
            index, units, width, M, splits, UNITS * CONSUMERS, COLUMNS, ROWS, GROUP
        )
        sums_0 = gl.zeros([SUM_ROWS, UNITS], gl.float32, layout)
        sums_1 = gl.zeros([SUM_ROWS, UNITS], gl.float32, layout)
        for _ in range(first_row, end_row, ROWS):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(full.index(stage), phase)
            if column == 0:
                sums_0 = _add_rows(sums_0, left_ring.index(stage * CONSUMERS))
                sums_1 = _add_rows(sums_1, left_ring.index(stage * CONSUMERS + 1))
            release_after_load(empty.index(stage))
            position += 1
        if column == 0:
            target = db_ptr + (split.to(gl.int64) * stride_split + unit)
            gl.store(target + columns, gl.sum(sums_0, 0).to(db_ptr.dtype.element_ty), mask=columns < units - unit)
            unit += UNITS
            target += UNITS
            gl.store(target + columns, gl.sum(sums_1, 0).to(db_ptr.dtype.element_ty), mask=columns < units - unit)


@gluon.jit
def _add_rows(sums, tile):
    SUM_ROWS: gl.constexpr = sums.shape[0]
    for piece in gl.static_range(tile.shape[0] // SUM_ROWS):
        sums += tile.slice(piece * SUM_ROWS, SUM_ROWS).load(sums.type.layout).to(gl.float32)
    return sums


@gluon.jit(do_not_specialize=["M", "splits", "work"])
def _pipelined_weight_and_bias_gradient_kernel(
    dy_desc, x_desc, dw_ptr, db_ptr, units, width, stride_split, M, splits, work,
    UNITS: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SUM_WARPS: gl.constexpr,
):  # fmt: skip
    # Gradients are dense, and there once per split.
    dtype: gl.constexpr = dy_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    gl.static_assert(CONSUMERS == 2)
    left_ring = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, UNITS], dy_desc.layout)
    right_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(full, empty, STAGES, CONSUMERS if db_ptr is None else CONSUMERS + 1)
    fence_async_shared()
    if db_ptr is None:
        gl.warp_specialize([
            (_consume, (
                gl.constexpr(0), dw_ptr, left_ring, right_ring, full, empty, stride_split, units, width, M, splits,
                work, UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
            (_consume, (
                gl.constexpr(1), dw_ptr, left_ring, right_ring, full, empty, stride_split, units, width, M, splits,
                work, UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
            (_produce, (
                dy_desc, x_desc, left_ring, right_ring, full, empty, units, width, M, splits, work,
                UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        # Twelve warps start with 168 registers each, sixteen with 128. Two that sum are in one group with the producer.
        CONSUMER_REGISTERS: gl.constexpr = 224 if SUM_WARPS == 2 else 208
        SUM_REGISTERS: gl.constexpr = 56 if SUM_WARPS == 2 else 64
        PRODUCER_REGISTERS: gl.constexpr = 56 if SUM_WARPS == 2 else 24
        gl.warp_specialize([
            (_consume, (
                gl.constexpr(0), dw_ptr, left_ring, right_ring, full, empty, stride_split, units, width, M, splits,
                work, UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
            (_consume, (
                gl.constexpr(1), dw_ptr, left_ring, right_ring, full, empty, stride_split, units, width, M, splits,
                work, UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
            (_sum, (
                db_ptr, left_ring, full, empty, stride_split, units, width, M, splits, work,
                UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP, SUM_WARPS,
            )),
            (_produce, (
                dy_desc, x_desc, left_ring, right_ring, full, empty, units, width, M, splits, work,
                UNITS, CONSUMERS, COLUMNS, ROWS, STAGES, GROUP,
            )),
        ], [4, SUM_WARPS, 1], [CONSUMER_REGISTERS, SUM_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def prepare_weight_gradient(
    dy: Matrix, x: Matrix, split_size: int, splits: int, config: WeightGradientPipeline
) -> Launch:
    """The launch for operands of these layouts."""
    units, width = dy.columns, x.columns
    tile_units, tile_columns = config.tile
    work = -(-units // tile_units) * -(-width // tile_columns) * splits
    return Launch(
        _pipelined_weight_and_bias_gradient_kernel,
        min(work, config.programs),
        (units, width, split_size),
        (dy.rows, splits, work),
        (config.units, config.consumers, config.columns, config.rows, config.stages, config.group, config.sum_warps),
        geometries=(
            dy.geometry(config.rows, config.units),
            x.geometry(config.rows, config.columns),
        ),
    )


def launch_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, targets: list[torch.Tensor | None], prepared: Launch
) -> None:
    """Fills ``targets``, dW and db (or None), or the first split's partials of them."""
    prepared(tuple(targets), (dy, x))
