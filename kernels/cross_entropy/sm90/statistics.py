"""Statistics of rows of logits on Hopper, from a product that never leaves the chip."""

from ...hopper import Resource, fence_async_shared, gl, gluon, resources
from ...matmul.sm90.cooperative import cooperative_ring, multiply
from ...matmul.sm90.elements import bias_of_columns
from ...matmul.sm90.loading import Term, load_term
from ...matmul.sm90.ring import HALF, TILE, column_halves
from ...matmul.sm90.roles import warp_specialize
from ..elements import LOWEST, logits_of
from ..tile import Partials, add_tile, first_column, first_largest, ranges_of, store_statistics

# Columns of which a thread has two in the wgmma layout.
QUAD = gl.constexpr(8)


@resources("bands tile_columns group COLUMNS")
class _Ranges(Resource):
    """The schedule: ``group`` bands of 128 rows at a time, whose columns are distributed over all programs."""


@resources("target_ptr bias_ptr partials M V scales ARITHMETIC")
class _Statistics(Resource):
    """What the epilogue reads and writes besides the product."""


@gluon.jit
def _range_of(schedule, first):
    """(this program's band, its range of columns, the number of ranges) in the group of bands from ``first`` on.

    The range of a program without work in the group begins past the last tile.
    """
    height = gl.minimum(schedule.group, schedule.bands - first)
    ranges = gl.minimum(gl.num_programs(0) // height, schedule.tile_columns)
    number = gl.program_id(0) // height
    # The first ranges may have a tile more; rotating them gives these to other programs in every group.
    turned = (number + first // schedule.group * (ranges - schedule.tile_columns % ranges)) % ranges
    own = gl.where(number < ranges, turned, schedule.tile_columns)
    return first + gl.program_id(0) % height, own, ranges


@gluon.jit
def _load(ring, schedule, term):
    position = 0
    for first in range(0, schedule.bands, schedule.group):
        band, own, ranges = _range_of(schedule, first)
        for tile in range(own, schedule.tile_columns, ranges):
            position = load_term(ring, term, band * TILE, tile * schedule.COLUMNS, 0, position)


@gluon.jit
def _value_at(x, column):
    """The value of every row at its ``column``, by bisection of the columns."""
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS > QUAD:
        left, right = column_halves(x)
        of_rows = gl.convert_layout(column, gl.SliceLayout(1, left.type.layout), assert_trivial=True)
        value = _value_at(gl.where(gl.expand_dims((of_rows & (COLUMNS // 2)) != 0, 1), right, left), of_rows)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUAD, 16])
        cols = gl.expand_dims(gl.arange(0, QUAD, gl.SliceLayout(0, layout)), 0)
        place = gl.convert_layout(column, gl.SliceLayout(1, layout), assert_trivial=True) & (QUAD - 1)
        value = gl.sum(gl.where(cols == gl.expand_dims(place, 1), x, 0.0), 1)
    return gl.convert_layout(value, column.type.layout, assert_trivial=True)


@gluon.jit
def _first_column(x, highest, column):
    """``first_column`` of a tile whose first column is ``column``, in few registers: 64 columns at a time."""
    if x.shape[1] > HALF:
        left, right = column_halves(x)
        first = _first_column(left, highest, column)
        first = gl.minimum(first, _first_column(right, highest, column + x.shape[1] // 2))
    else:
        cols = column + gl.arange(0, HALF, gl.SliceLayout(0, x.type.layout))
        of_rows = gl.convert_layout(highest, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        first = first_column(x, cols, of_rows)
    return gl.convert_layout(first, highest.type.layout, assert_trivial=True)


@gluon.jit
def _consume(consumer: gl.constexpr, ring, schedule, steps, given, LEAD: gl.constexpr):
    COLUMNS: gl.constexpr = schedule.COLUMNS
    ENTROPY: gl.constexpr = given.partials.spread_ptr is not None
    SMOOTHING: gl.constexpr = given.partials.weighted_ptr is not None
    INDEXED: gl.constexpr = given.partials.index_ptr is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    lanes = gl.arange(0, HALF, of_rows)
    cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    count = 0
    for first in range(0, schedule.bands, schedule.group):
        band, own, ranges = _range_of(schedule, first)
        rows = band * TILE + consumer * HALF + lanes
        target = gl.load(given.target_ptr + rows, mask=rows < given.M, other=-1)
        # Columns are compared in 32 bits; a target that is none becomes negative.
        target = gl.where((target >= 0) & (target < given.V), target, -COLUMNS).to(gl.int32)
        top = gl.full([HALF], LOWEST, gl.float32, of_rows)
        total = gl.zeros([HALF], gl.float32, of_rows)
        spread = gl.zeros([HALF], gl.float32, of_rows)
        sums = gl.zeros([HALF], gl.float32, of_rows)
        chosen = gl.zeros([HALF], gl.float32, of_rows)
        found = gl.zeros([HALF], gl.int32, of_rows)
        index = gl.zeros([HALF], gl.int32, of_rows) + own * COLUMNS
        for tile in range(own, schedule.tile_columns, ranges):
            column = tile * COLUMNS
            acc = bias_of_columns(given.bias_ptr, 0, column, given.V, COLUMNS)
            acc = multiply(consumer, acc, ring, count * steps, steps, count, LEAD)
            count += 1
            x, _ = logits_of(acc, given.scales, given.ARITHMETIC)
            place = target - column
            here = (place >= 0) & (place < COLUMNS)
            chosen = gl.where(here, _value_at(x, place), chosen)
            found = gl.where(here, 1, found)
            if column + COLUMNS > given.V:
                x = gl.where(gl.expand_dims(column + cols < given.V, 0), x, 0.0 if SMOOTHING else float("-inf"))
            if SMOOTHING:
                sums += gl.sum(x, 1)
                if column + COLUMNS > given.V:
                    x = gl.where(gl.expand_dims(column + cols < given.V, 0), x, float("-inf"))
            if INDEXED:
                highest = gl.max(x, 1)
                index = first_largest(top, index, highest, _first_column(x, highest, column))
            top, total, spread = add_tile(x, top, total, spread, ENTROPY, "hardware")
        if own < ranges:
            _, place = ranges_of(band, schedule.bands, schedule.tile_columns, gl.num_programs(0), schedule.group)
            at = (place + own) * TILE + consumer * HALF + lanes
            store_statistics(given.partials, at, rows, top, total, spread, sums, index, chosen, found)


@gluon.jit(do_not_specialize=["M", "bands", "group", "scales"])
def sm90_statistics_kernel(
    x_desc, w_desc, target_ptr, bias_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, index_ptr, chosen_ptr,
    inner, V, tile_columns, M, bands, group, scales,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    schedule = _Ranges(bands=bands, tile_columns=tile_columns, group=group, COLUMNS=COLUMNS)
    ring = cooperative_ring(x_desc, w_desc, COLUMNS, False, True, STAGES.step, STAGES.stages, 2, 1)
    given = _Statistics(
        target_ptr=target_ptr, bias_ptr=bias_ptr, M=M, V=V, scales=scales, ARITHMETIC=ARITHMETIC,
        partials=Partials(top_ptr, total_ptr, spread_ptr, weighted_ptr, index_ptr, chosen_ptr),
    )  # fmt: skip
    term = Term(left=x_desc, right=w_desc, other=None, inner=inner, first=0)
    fence_async_shared()
    steps = gl.cdiv(inner, STAGES.step)
    warp_specialize(2, _consume, (ring, schedule, steps, given, LEAD), _load, (ring, schedule, term))
