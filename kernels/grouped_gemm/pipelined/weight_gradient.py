"""The weight gradients of all experts on Hopper: the product of both operands over each expert's own rows.

Experts have few rows or many: a tile takes as many steps as its expert has rows.
"""

from ...gemm_epilogue.pipelined.products import HALF, TILE
from ...hopper import Matrix, fence_async_shared, gl, gluon, tma
from ...launching import Launch, ceil_div
from ...pipeline import specialize
from ...tiles import grouped_tile
from ...tuning.grouped_gemm_pipelines import CooperativePipeline
from .cooperative import WIDE, copy_step, make_ring, multiply, store


@gluon.jit
def _tile_of(
    index, starts_ptr, order_ptr, tile_rows, tile_columns, end, STEP: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """(expert, its first row, steps, first unit, first column) of the ``index``-th tile.

    An expert without rows takes a step of the rows past the ``end``, which are zeros.
    """
    expert = index // (tile_rows * tile_columns)
    if order_ptr is not None:
        expert = gl.load(order_ptr + expert)
    first = gl.load(starts_ptr + expert)
    steps = gl.cdiv(gl.load(starts_ptr + expert + 1) - first, STEP)
    unit, column = grouped_tile(index % (tile_rows * tile_columns), tile_rows, tile_columns, GROUP)
    return expert, gl.where(steps > 0, first, end), gl.maximum(steps, 1), unit * TILE, column * WIDE


@gluon.jit
def _copy_rows(
    left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows, tile_columns, work,
    end, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        _, first, steps, unit, column = _tile_of(
            index, starts_ptr, order_ptr, tile_rows, tile_columns, end, STEP, GROUP
        )
        for step in range(steps):
            row = first + step * STEP
            position = copy_step(
                left_desc, right_desc, left_ring, right_ring, full, empty, [row, unit], [row, unit + HALF],
                [row, column], position, STAGES,
            )  # fmt: skip


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_desc, left_ring, right_ring, places, full, empty, starts_ptr, order_ptr, tile_rows,
    tile_columns, work, units, out_rows, end,
    STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    sent = 0
    position = 0
    for index in range(gl.program_id(0), work, gl.num_programs(0)):
        expert, _, steps, unit, column = _tile_of(
            index, starts_ptr, order_ptr, tile_rows, tile_columns, end, STEP, GROUP
        )
        acc = gl.zeros([HALF, WIDE], gl.float32, layout)
        acc = multiply(consumer, acc, left_ring, right_ring, full, empty, position, steps, True, False, STAGES)
        position += steps
        row = unit + consumer * HALF
        # Behind the last unit of an expert lie those of the next one.
        if row < units:
            sent = store(consumer, out_desc, expert * out_rows + row, column, acc, places, sent, PLACES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["units", "tile_rows", "tile_columns", "work", "out_rows", "end"])
def _pipelined_grouped_weight_gradient_kernel(
    left_desc, right_desc, out_desc, starts_ptr, order_ptr, units, tile_rows, tile_columns, work, out_rows, end,
    STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    left_ring, right_ring, full, empty = make_ring(left_desc, right_desc, True, False, STEP, STAGES)
    places = gl.allocate_shared_memory(left_desc.dtype, [2 * PLACES, HALF, HALF], out_desc.layout)
    fence_async_shared()
    specialize(2, _consume, (
        out_desc, left_ring, right_ring, places, full, empty, starts_ptr, order_ptr, tile_rows, tile_columns, work,
        units, out_rows, end, STEP, STAGES, PLACES, GROUP,
    ), _copy_rows, (
        left_desc, right_desc, left_ring, right_ring, full, empty, starts_ptr, order_ptr, tile_rows, tile_columns, work,
        end, STEP, STAGES, GROUP,
    ))  # fmt: skip


def prepare_weight_gradient(
    left: Matrix, right: Matrix, out: Matrix, experts: int, units: int, config: CooperativePipeline
) -> Launch:
    """The launch for operands of these layouts, whose gradients of all experts lie behind one another in ``out``.

    Its tensors are (left ``[rows, units]``, right ``[rows, columns]``, gradients), and beside them where the rows of
    each expert begin, and the experts in the order in which their tiles are to be computed, or None.
    """
    half, wide = HALF.value, WIDE.value
    tile_rows, tile_columns = ceil_div(units, TILE.value), ceil_div(right.columns, wide)
    work = experts * tile_rows * tile_columns
    return Launch(
        _pipelined_grouped_weight_gradient_kernel,
        min(work, config.programs),
        (units, tile_rows, tile_columns, work, out.step),
        (left.rows,),
        (config.step, config.stages, config.places, config.group),
        geometries=(
            left.geometry(config.step, half),
            right.geometry(config.step, wide),
            out.geometry(half, half),
        ),
    )
