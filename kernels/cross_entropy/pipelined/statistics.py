"""Statistics of rows of logits on Hopper, from a product that never leaves the chip."""

from collections.abc import Sequence

import torch

from ...hopper import Matrix, fence_async_shared, gl, gluon
from ...launching import launch
from ...pipeline import specialize
from ...tuning import CONSUMER_ROWS
from ...tuning.cross_entropy import LogitPipeline, Shares
from ..elements import LOWEST, logits_of
from ..tile import add_tile, ranges_of
from .product import BAND, ROWS, begin, copy_tile, halves, make_ring, multiply

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
    position = 0
    for first in range(0, bands, group):
        band, own, ranges = _work(first, bands, tile_columns, group)
        for tile in range(own, tile_columns, ranges):
            position = copy_tile(
                x_desc, w_desc, x_ring, w_ring, full, empty, band * BAND, tile * COLUMNS, inner, position, STEP, STAGES
            )


@gluon.jit
def _half_at(x, column):
    """Of every row the half of the columns in which ``column`` lies."""
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = halves(x)
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
            acc = begin(bias_ptr, column, V, COLUMNS)
            acc = multiply(consumer, acc, x_ring, w_ring, full, empty, lead, count, steps, STAGES, LEAD)
            count += 1
            x, _ = logits_of(acc, scale, softcap, inverse_cap, SCALED, SOFTCAP, ACCURACY)
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
    x_ring, w_ring, full, empty, lead = make_ring(x_desc, w_desc, COLUMNS, STEP, STAGES)
    fence_async_shared()
    steps = gl.cdiv(inner, STEP)
    specialize(2, _consume, (
        target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, chosen_ptr, x_ring, w_ring, full, empty,
        lead, bands, tile_columns, group, steps, M, V, scale, softcap, inverse_cap, COLUMNS, LEVELS, STAGES, LEAD,
        SCALED, SOFTCAP, ACCURACY,
    ), _produce, (
        x_desc, w_desc, x_ring, w_ring, full, empty, bands, tile_columns, group, inner, COLUMNS, STEP, STAGES,
    ))  # fmt: skip


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
