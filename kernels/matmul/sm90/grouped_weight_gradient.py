"""The weight gradients of all experts on Hopper (grouped K): the product of both operands over each expert's rows.

The number of a tile's steps depends on how many rows its expert has. Operands in 8 bits come transposed, with a scale
for each expert, and long sums are summed in parts: see ``scaled_product``.
"""

from ...hopper import Matrix, Resource, fence_async_shared, gl, gluon, resources, tma
from ...launching import Launch, ceil_div
from ...tiles import grouped_tile
from ...tuning.grouped_gemm_pipelines import CooperativePipeline
from .cooperative import cooperative_ring, multiply, store_rows
from .elements import packed, plus_packed, zeros
from .grouped_product import WIDE
from .loading import load_rows
from .ring import HALF, TILE, column_halves, make_staging
from .roles import warp_specialize
from .scaled_product import PART


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
def _sums(consumer: gl.constexpr, ring, position, steps, scales_ptr, expert, PART_STEPS: gl.constexpr):
    """This consumer's rows of the product of ``steps`` steps: the left and the right half of their columns."""
    if scales_ptr is None:
        left, right = column_halves(multiply(consumer, zeros(HALF, WIDE), ring, position, steps))
    else:
        left, right = column_halves(zeros(HALF, WIDE, 8))
        for first in range(0, steps, PART_STEPS):
            waiting = packed(left, right)
            count = gl.minimum(steps - first, PART_STEPS)
            left, right = plus_packed(
                multiply(consumer, zeros(HALF, WIDE, 8), ring, position + first, count), waiting
            )  # fmt: skip
        scale = gl.load(scales_ptr + expert)
        left, right = left * scale, right * scale
    return left, right


@gluon.jit
def _consume(
    consumer: gl.constexpr, ring, schedule, out_desc, staging, units, out_rows, scales_ptr, PART_STEPS: gl.constexpr
):  # fmt: skip
    stored = 0
    position = 0
    for index in range(gl.program_id(0), schedule.work, gl.num_programs(0)):
        expert, _, steps, unit, column = _tile_at(schedule, index)
        left, right = _sums(consumer, ring, position, steps, scales_ptr, expert, PART_STEPS)
        position += steps
        row = unit + consumer * HALF
        # The next expert begins past the last unit of this one.
        if row < units:
            row += expert * out_rows
            stored = store_rows(consumer, out_desc, row, column, left, staging, stored)
            stored = store_rows(consumer, out_desc, row, column + WIDE // 2, right, staging, stored)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["units", "tile_rows", "tile_columns", "work", "out_rows", "end"])
def _sm90_grouped_weight_gradient_kernel(
    left_desc, right_desc, out_desc, starts_ptr, order_ptr, scales_ptr, units, tile_rows, tile_columns, work, out_rows,
    end, STEP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, PART_STEPS: gl.constexpr,
):  # fmt: skip
    schedule = _GroupedInner(
        starts_ptr=starts_ptr, order_ptr=order_ptr, tile_rows=tile_rows, tile_columns=tile_columns, work=work, end=end,
        STEP=STEP, GROUP=GROUP,
    )  # fmt: skip
    SCALED: gl.constexpr = scales_ptr is not None
    ring = cooperative_ring(left_desc, right_desc, WIDE, not SCALED, SCALED, STEP, STAGES)
    staging = make_staging(out_desc, SLOTS)
    fence_async_shared()
    warp_specialize(
        2, _consume, (ring, schedule, out_desc, staging, units, out_rows, scales_ptr, PART_STEPS),
        _load, (ring, schedule, left_desc, right_desc),
    )  # fmt: skip


def prepare_grouped_weight_gradient(
    left: Matrix, right: Matrix, out: Matrix, experts: int, units: int, config: CooperativePipeline
) -> Launch:
    """The launch for operands of these layouts; ``out`` stacks the gradients of all experts.

    Its tensors are left ``[rows, units]`` and right ``[rows, columns]``, both transposed in 8 bits; the gradients, the
    first row of each expert, experts in the order in which to compute their tiles or None, and in 8 bits the scale of
    each expert.
    """
    half, wide = HALF.value, WIDE.value
    rows = left.columns if left.transposed else left.rows
    tile_rows, tile_columns = ceil_div(units, TILE.value), ceil_div(out.columns, wide)
    work = experts * tile_rows * tile_columns
    return Launch(
        _sm90_grouped_weight_gradient_kernel,
        min(work, config.programs),
        (units, tile_rows, tile_columns, work, out.step),
        (rows,),
        (config.step, config.stages, config.slots, config.group, PART // config.step),
        geometries=(
            left.geometry(config.step, half),
            right.geometry(config.step, wide),
            out.geometry(half, half),
        ),
    )
