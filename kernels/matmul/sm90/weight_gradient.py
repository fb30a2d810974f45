"""dW and db on Hopper: the product of dy and x over their rows, and the sums of dy from the same stages of the ring.

The kernel is persistent: the loads of a tile start while the previous one is still being stored. Separate warps sum dy
from the stages that the products read: the tensor cores have no extra work.
"""

from ...hopper import Matrix, Resource, fence_async_shared, gl, gluon, resources
from ...launching import Launch
from ...tiles import grouped_tile, split_range
from ...tuning import WeightGradientPipeline
from .cooperative import cooperative_ring, multiply
from .elements import zeros
from .loading import load_rows
from .ring import release_after_load, wait_full
from .roles import warp_specialize


@resources("units width M splits work UNITS COLUMNS STEP GROUP")
class _SplitInner(Resource):
    """The schedule: tiles of dW, with ``UNITS`` of their rows for each consumer, over one split of the ``M`` rows."""


@gluon.jit
def _tile_at(schedule, index):
    """(split, first unit, first column, first row, steps) of the ``index``-th work item: split by split."""
    TILE: gl.constexpr = 2 * schedule.UNITS
    unit_tiles = gl.cdiv(schedule.units, TILE)
    column_tiles = gl.cdiv(schedule.width, schedule.COLUMNS)
    split = index // (unit_tiles * column_tiles)
    tile = index % (unit_tiles * column_tiles)
    unit, column = grouped_tile(tile, unit_tiles, column_tiles, schedule.GROUP)
    first, end = split_range(split, schedule.M, schedule.splits, schedule.STEP)
    return split, unit * TILE, column * schedule.COLUMNS, first, gl.cdiv(gl.maximum(end - first, 0), schedule.STEP)


@gluon.jit
def _load(ring, schedule, dy_desc, x_desc):
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        _, unit, column, row, steps = _tile_at(schedule, index)
        position = load_rows(ring, dy_desc, x_desc, unit, column, row, steps, position)


@gluon.jit
def _consume(consumer: gl.constexpr, ring, schedule, dw_ptr, stride_split):
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        split, unit, column, _, steps = _tile_at(schedule, index)
        acc = zeros(schedule.UNITS, schedule.COLUMNS)
        acc = multiply(consumer, acc, ring, position, steps, MAY_BE_EMPTY=True)
        position += steps
        unit += consumer * schedule.UNITS
        rows = gl.arange(0, schedule.UNITS, gl.SliceLayout(1, acc.type.layout))
        columns = gl.arange(0, schedule.COLUMNS, gl.SliceLayout(0, acc.type.layout))
        inside = gl.expand_dims(rows < schedule.units - unit, 1) & gl.expand_dims(columns < schedule.width - column, 0)
        offsets = gl.expand_dims(rows.to(gl.int64) * schedule.width, 1) + gl.expand_dims(columns, 0)
        target = dw_ptr + (split.to(gl.int64) * stride_split + unit.to(gl.int64) * schedule.width + column)
        gl.store(target + offsets, acc.to(dw_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _sum(ring, schedule, db_ptr, stride_split, WARPS: gl.constexpr):
    """The sums of dy over the rows, stored by the programs of the first column of tiles."""
    UNITS: gl.constexpr = schedule.UNITS
    LANES: gl.constexpr = UNITS // 8
    # The swizzle of a stage repeats after 8 rows: 8 or 16 of them are in registers at once.
    SUM_ROWS: gl.constexpr = WARPS * (32 // LANES)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    columns = gl.arange(0, UNITS, gl.SliceLayout(0, layout))
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        split, unit, column, _, steps = _tile_at(schedule, index)
        sums_0 = gl.zeros([SUM_ROWS, UNITS], gl.float32, layout)
        sums_1 = gl.zeros([SUM_ROWS, UNITS], gl.float32, layout)
        for _ in range(steps):
            stage = wait_full(ring, position)
            if column == 0:
                sums_0 = _add_rows(sums_0, ring.left.index(stage * 2))
                sums_1 = _add_rows(sums_1, ring.left.index(stage * 2 + 1))
            release_after_load(ring.empty.index(stage))
            position += 1
        if column == 0:
            target = db_ptr + (split.to(gl.int64) * stride_split + unit)
            gl.store(
                target + columns, gl.sum(sums_0, 0).to(db_ptr.dtype.element_ty), mask=columns < schedule.units - unit
            )
            unit += UNITS
            target += UNITS
            gl.store(
                target + columns, gl.sum(sums_1, 0).to(db_ptr.dtype.element_ty), mask=columns < schedule.units - unit
            )


@gluon.jit
def _add_rows(sums, tile):
    SUM_ROWS: gl.constexpr = sums.shape[0]
    for piece in gl.static_range(tile.shape[0] // SUM_ROWS):
        sums += tile.slice(piece * SUM_ROWS, SUM_ROWS).load(sums.type.layout).to(gl.float32)
    return sums


@gluon.jit(do_not_specialize=["M", "splits", "work"])
def _sm90_weight_and_bias_gradient_kernel(
    dy_desc, x_desc, dw_ptr, db_ptr, units, width, stride_split, M, splits, work,
    UNITS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SUM_WARPS: gl.constexpr,
):  # fmt: skip
    # The gradients of a split are contiguous, one after another.
    schedule = _SplitInner(
        units=units, width=width, M=M, splits=splits, work=work, UNITS=UNITS, COLUMNS=COLUMNS, STEP=ROWS, GROUP=GROUP
    )
    ring = cooperative_ring(dy_desc, x_desc, COLUMNS, True, False, ROWS, STAGES, 2 if db_ptr is None else 3)
    fence_async_shared()
    if db_ptr is None:
        warp_specialize(2, _consume, (ring, schedule, dw_ptr, stride_split), _load, (ring, schedule, dy_desc, x_desc))
    else:
        # Twelve warps start with 168 registers each, sixteen with 128. Two summing warps share the load warp's group.
        CONSUMER_REGISTERS: gl.constexpr = 224 if SUM_WARPS == 2 else 208
        SUM_REGISTERS: gl.constexpr = 56 if SUM_WARPS == 2 else 64
        LOAD_REGISTERS: gl.constexpr = 56 if SUM_WARPS == 2 else 24
        gl.warp_specialize([
            (_consume, (gl.constexpr(0), ring, schedule, dw_ptr, stride_split)),
            (_consume, (gl.constexpr(1), ring, schedule, dw_ptr, stride_split)),
            (_sum, (ring, schedule, db_ptr, stride_split, SUM_WARPS)),
            (_load, (ring, schedule, dy_desc, x_desc)),
        ], [4, SUM_WARPS, 1], [CONSUMER_REGISTERS, SUM_REGISTERS, LOAD_REGISTERS])  # fmt: skip


def prepare_weight_gradient(
    dy: Matrix, x: Matrix, split_size: int, splits: int, config: WeightGradientPipeline
) -> Launch:
    """The launch for operands of these layouts; its tensors are dy, x, and those to fill: dW, db, or their partials."""
    units, width = dy.columns, x.columns
    tile_units, tile_columns = config.tile
    work = -(-units // tile_units) * -(-width // tile_columns) * splits
    return Launch(
        _sm90_weight_and_bias_gradient_kernel,
        min(work, config.programs),
        (units, width, split_size),
        (dy.rows, splits, work),
        (config.units, config.columns, config.rows, config.stages, config.group, config.sum_warps),
        geometries=(
            dy.geometry(config.rows, config.units),
            x.geometry(config.rows, config.columns),
        ),
    )
