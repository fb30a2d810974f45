"""The weight gradients of all experts on Hopper (grouped K): the product of both operands over each expert's rows.

The number of a tile's steps depends on how many rows its expert has.
"""

from ...hopper import Matrix, Resource, fence_async_shared, gl, gluon, resources, tma
from ...launching import Launch, ceil_div
from ...tiles import grouped_tile
from ...tuning.grouped_gemm_pipelines import CooperativePipeline
from .cooperative import cooperative_ring, multiply, store_rows
from .elements import zeros
from .grouped_product import WIDE
from .loading import load_rows
from .ring import HALF, TILE, make_staging
from .roles import warp_specialize


@resources("starts_ptr order_ptr tile_rows tile_columns work end STEP GROUP")
class _GroupedInner(Resource):
    """The schedule: the tiles of all experts, each over the rows of its own expert."""


@gluon.jit
def _tile_at(schedule, index):
    """(expert, its first row, steps, first unit, first column) of the ``index``-th tile.

    An expert without rows takes one step past the last row, where TMA loads zeros.
    """
    tiles = schedule.tile_rows * schedule.tile_columns
    expert = index // tiles
    if schedule.order_ptr is not None:
        expert = gl.load(schedule.order_ptr + expert)
    first = gl.load(schedule.starts_ptr + expert)
    steps = gl.cdiv(gl.load(schedule.starts_ptr + expert + 1) - first, schedule.STEP)
    unit, column = grouped_tile(index % tiles, schedule.tile_rows, schedule.tile_columns, schedule.GROUP)
    return expert, gl.where(steps > 0, first, schedule.end), gl.maximum(steps, 1), unit * TILE, column * WIDE


@gluon.jit
def _load(ring, schedule, left_desc, right_desc):
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        _, first, steps, unit, column = _tile_at(schedule, index)
        position = load_rows(ring, left_desc, right_desc, unit, column, first, steps, position)


@gluon.jit
def _consume(consumer: gl.constexpr, ring, schedule, out_desc, staging, units, out_rows):
    stored = 0
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        expert, _, steps, unit, column = _tile_at(schedule, index)
        acc = multiply(consumer, zeros(HALF, WIDE), ring, position, steps)
        position += steps
        row = unit + consumer * HALF
        # The next expert begins past the last unit of this one.
        if row < units:
            stored = store_rows(consumer, out_desc, expert * out_rows + row, column, acc, staging, stored)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["units", "tile_rows", "tile_columns", "work", "out_rows", "end"])
def _sm90_grouped_weight_gradient_kernel(
    left_desc, right_desc, out_desc, starts_ptr, order_ptr, units, tile_rows, tile_columns, work, out_rows, end,
    STEP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    schedule = _GroupedInner(
        starts_ptr=starts_ptr, order_ptr=order_ptr, tile_rows=tile_rows, tile_columns=tile_columns, work=work, end=end,
        STEP=STEP, GROUP=GROUP,
    )  # fmt: skip
    ring = cooperative_ring(left_desc, right_desc, WIDE, True, False, STEP, STAGES)
    staging = make_staging(out_desc, SLOTS)
    fence_async_shared()
    warp_specialize(
        2, _consume, (ring, schedule, out_desc, staging, units, out_rows),
        _load, (ring, schedule, left_desc, right_desc),
    )  # fmt: skip


def prepare_grouped_weight_gradient(
    left: Matrix, right: Matrix, out: Matrix, experts: int, units: int, config: CooperativePipeline
) -> Launch:
    """The launch for operands of these layouts; ``out`` stacks the gradients of all experts.

    Its tensors are (left ``[rows, units]``, right ``[rows, columns]``, gradients, first row of each expert, experts in
    the order in which to compute their tiles or None).
    """
    half, wide = HALF.value, WIDE.value
    tile_rows, tile_columns = ceil_div(units, TILE.value), ceil_div(right.columns, wide)
    work = experts * tile_rows * tile_columns
    return Launch(
        _sm90_grouped_weight_gradient_kernel,
        min(work, config.programs),
        (units, tile_rows, tile_columns, work, out.step),
        (left.rows,),
        (config.step, config.stages, config.slots, config.group),
        geometries=(
            left.geometry(config.step, half),
            right.geometry(config.step, wide),
            out.geometry(half, half),
        ),
    )
