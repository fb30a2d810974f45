"""Statistics of rows of logits on Hopper, from a product that never leaves the chip.

Two consumers of 64 rows each share the columns of a tile, so that one copy of a weight serves both. The second one
stays some stages behind the first one: while one of them reduces its tile, the other one has the matrix units.
"""

from collections.abc import Sequence

import torch

from ..hopper import (
    Matrix,
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    untransposed,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..launching import launch
from ..pipeline import init_barriers, stage_of
from ..tuning import CONSUMER_ROWS
from ..tuning.cross_entropy import LogitPipeline, Shares
from .rows import LOWEST
from .tile import add_tile, logits_of, ranges_of

# Rows of a consumer, and of a program's tile.
ROWS = gl.constexpr(CONSUMER_ROWS)
BAND = gl.constexpr(2 * CONSUMER_ROWS)
# Columns of which a thread has two.
QUAD = gl.constexpr(8)


@gluon.jit
def _work(first, bands, tile_columns, group):
    """(this program's band, its range of columns, how many there are) in the group of bands from ``first`` on.

    A range behind the last tile says that the program has nothing to do in the group.
    """
    height = gl.minimum(group, bands - first)
    ranges = gl.minimum(gl.num_programs(0) // height, tile_columns)
    number = gl.program_id(0) // height
    # The first ranges have a tile more than the others: in every group other programs have them.
    turned = (number + first // group * (ranges - tile_columns % ranges)) % ranges
    return first + gl.program_id(0) % height, gl.where(number < ranges, turned, tile_columns), ranges


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, full, empty, bands, tile_columns, group, inner,
    COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes
    position = 0
    for first in range(0, bands, group):
        band, own, ranges = _work(first, bands, tile_columns, group)
        row = band * BAND
        for tile in range(own, tile_columns, ranges):
            for k in range(0, inner, STEP):
                stage, phase = stage_of(position, STAGES)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full.index(stage), BYTES)
                copy_in(x_desc, [row, k], full.index(stage), x_ring.index(stage * 2))
                copy_in(x_desc, [row + ROWS, k], full.index(stage), x_ring.index(stage * 2 + 1))
                copy_in(w_desc, [tile * COLUMNS, k], full.index(stage), w_ring.index(stage))
                position += 1


@gluon.jit
def _multiply(
    consumer: gl.constexpr, acc, x_ring, w_ring, full, empty, lead, count, steps,
    STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Adds the product of the ``count``-th tile of this program to the consumer's rows of it."""
    # A tile of fewer steps than there are stages would let the first consumer pass the barrier twice.
    leads = steps >= STAGES
    if LEAD > 0 and consumer == 1:
        mbarrier.wait(lead, count & 1, pred=leads)
    position = count * steps
    for step in range(steps):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(full.index(stage), phase)
        right = w_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(stage * 2 + consumer), right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if step > 0:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        if LEAD > 0 and consumer == 0:
            # No branch: behind one the assembler would have the products wait for one another.
            mbarrier.arrive(lead, pred=leads & (step == LEAD - 1))
        position += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((position - 1) % STAGES))
    return acc


@gluon.jit
def _halves(x):
    """The left and the right half of the columns; they lie in the same registers as before."""
    HALF: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _half_at(x, column):
    """Of every row the half of the columns in which ``column`` lies."""
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = _halves(x)
    column = gl.convert_layout(column, gl.SliceLayout(1, left.type.layout), assert_trivial=True)
    return gl.where(gl.expand_dims((column & HALF) != 0, 1), right, left)


@gluon.jit
def _value_at(x, column, LEVELS: gl.constexpr):
    """Of every row the value in ``column``: half of the candidates are left at every level."""
    for _ in gl.static_range(LEVELS):
        x = _half_at(x, column)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUAD, 16])
    cols = gl.expand_dims(gl.arange(0, QUAD, gl.SliceLayout(0, layout)), 0)
    place = gl.convert_layout(column, gl.SliceLayout(1, layout), assert_trivial=True) & (QUAD - 1)
    value = gl.sum(gl.where(cols == gl.expand_dims(place, 1), x, 0.0), 1)
    return gl.convert_layout(value, column.type.layout, assert_trivial=True)


@gluon.jit
def _consume(
    consumer: gl.constexpr, target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, chosen_ptr,
    x_ring, w_ring, full, empty, lead, bands, tile_columns, group, steps, M, V, scale, softcap, inverse_cap,
    COLUMNS: gl.constexpr, LEVELS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
    SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    ENTROPY: gl.constexpr = spread_ptr is not None
    SMOOTHING: gl.constexpr = weighted_ptr is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    lanes = gl.arange(0, ROWS, of_rows)
    cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    count = 0
    for first in range(0, bands, group):
        band, own, ranges = _work(first, bands, tile_columns, group)
        rows = band * BAND + consumer * ROWS + lanes
        target = gl.load(target_ptr + rows, mask=rows < M, other=-1)
        # A column is compared in 32 bits; a target that is none stays below all of them.
        target = gl.where((target >= 0) & (target < V), target, -COLUMNS).to(gl.int32)
        top = gl.full([ROWS], LOWEST, gl.float32, of_rows)
        total = gl.zeros([ROWS], gl.float32, of_rows)
        spread = gl.zeros([ROWS], gl.float32, of_rows)
        sums = gl.zeros([ROWS], gl.float32, of_rows)
        chosen = gl.zeros([ROWS], gl.float32, of_rows)
        found = gl.zeros([ROWS], gl.int32, of_rows)
        for tile in range(own, tile_columns, ranges):
            column = tile * COLUMNS
            acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
            if bias_ptr is not None:
                acc += gl.expand_dims(gl.load(bias_ptr + gl.minimum(column + cols, V - 1)).to(gl.float32), 0)
            acc = _multiply(consumer, acc, x_ring, w_ring, full, empty, lead, count, steps, STAGES, LEAD)
            count += 1
            x = logits_of(acc, scale, softcap, inverse_cap, SCALED, SOFTCAP, ACCURACY)
            place = target - column
            here = (place >= 0) & (place < COLUMNS)
            chosen = gl.where(here, _value_at(x, place, LEVELS), chosen)
            found = gl.where(here, 1, found)
            if column + COLUMNS > V:
                x = gl.where(gl.expand_dims(column + cols < V, 0), x, 0.0 if SMOOTHING else float("-inf"))
            if SMOOTHING:
                sums += gl.sum(x, 1)
                if column + COLUMNS > V:
                    x = gl.where(gl.expand_dims(column + cols < V, 0), x, float("-inf"))
            top, total, spread = add_tile(x, top, total, spread, ENTROPY, "hardware")
        if own < ranges:
            _, place = ranges_of(band, bands, tile_columns, gl.num_programs(0), group)
            at = (place + own) * BAND + consumer * ROWS + lanes
            gl.store(top_ptr + at, top)
            gl.store(total_ptr + at, total)
            if ENTROPY:
                gl.store(spread_ptr + at, spread)
            if SMOOTHING:
                gl.store(weighted_ptr + at, sums)
            gl.store(chosen_ptr + rows, chosen, mask=found != 0)


@gluon.jit(do_not_specialize=["M", "bands", "group", "scale", "softcap", "inverse_cap"])
def _pipelined_statistics_kernel(
    x_desc, w_desc, target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, chosen_ptr,
    inner, V, tile_columns, M, bands, group, scale, softcap, inverse_cap,
    COLUMNS: gl.constexpr, LEVELS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
    SCALED: gl.constexpr, SOFTCAP: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, STEP], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    lead = gl.allocate_shared_memory(gl.int64, [1], barrier)
    init_barriers(full, empty, STAGES, 2)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    steps = gl.cdiv(inner, STEP)
    gl.warp_specialize([
        (_consume, (
            gl.constexpr(0), target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, chosen_ptr,
            x_ring, w_ring, full, empty, lead, bands, tile_columns, group, steps, M, V, scale, softcap, inverse_cap,
            COLUMNS, LEVELS, STAGES, LEAD, SCALED, SOFTCAP, ACCURACY,
        )),
        (_consume, (
            gl.constexpr(1), target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, chosen_ptr,
            x_ring, w_ring, full, empty, lead, bands, tile_columns, group, steps, M, V, scale, softcap, inverse_cap,
            COLUMNS, LEVELS, STAGES, LEAD, SCALED, SOFTCAP, ACCURACY,
        )),
        (_produce, (
            x_desc, w_desc, x_ring, w_ring, full, empty, bands, tile_columns, group, inner, COLUMNS, STEP, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


def takes(x: torch.Tensor, linear_weight: torch.Tensor) -> tuple[Matrix, Matrix] | None:
    """Both as matrices to copy, or None where this kernel does not compute their product."""
    left, right = untransposed(x), untransposed(linear_weight)
    return None if left is None or right is None else (left, right)


def statistics(
    matrices: tuple[Matrix, Matrix],
    vectors: tuple[torch.Tensor | None, ...],
    numbers: Sequence[float],
    capped: bool,
    accuracy: str,
    shares: Shares,
    pipeline: LogitPipeline,
) -> None:
    """Fills the partial statistics; ``vectors`` and the last ``numbers`` are those of the kernel's signature."""
    x, weight = matrices
    levels = (pipeline.columns // QUAD.value).bit_length() - 1
    launch(
        _pipelined_statistics_kernel,
        shares.programs,
        vectors,
        (x.columns, weight.rows, shares.tile_columns),
        (x.rows, shares.bands, shares.group, *numbers),
        (
            pipeline.columns, levels, pipeline.step, pipeline.stages, pipeline.lead, numbers[0] != 1.0, capped,
            accuracy,
        ),
        descriptors=(x.descriptor(CONSUMER_ROWS, pipeline.step), weight.descriptor(pipeline.columns, pipeline.step)),
    )  # fmt: skip
