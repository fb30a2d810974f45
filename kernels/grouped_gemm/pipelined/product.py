"""Products of rows sorted by expert with the weights of their experts on Hopper, or the sum of two such products."""

from ...gemm_epilogue.pipelined.products import HALF, TILE, rows_in_use, tile_of
from ...hopper import Matrix, dense, fence_async_shared, gl, gluon, tma
from ...launching import Launch, ceil_div
from ...pipeline import specialize
from ...tuning.grouped_gemm_pipelines import CooperativePipeline
from .cooperative import WIDE, copy_step, make_ring, multiply, store


@gluon.jit
def _copy_term(
    a_desc, w_desc, left_ring, right_ring, full, empty, row, column, first, inner, position,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies all steps of one product; the expert's weights begin at row ``first`` of ``w_desc``."""
    for k in range(0, inner, STEP):
        if RIGHT_TRANSPOSED:
            right = [first + column, k]
        else:
            right = [first + k, column]
        position = copy_step(
            a_desc, w_desc, left_ring, right_ring, full, empty, [row, k], [row + HALF, k], right, position, STAGES
        )
    return position


@gluon.jit
def _copy_terms(
    a_desc, w_desc, other_desc, other_w_desc, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
    experts, RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    position = 0
    for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
        tile_row, tile_column, expert = tile_of(index, tile_rows, tile_columns, experts, GROUP)
        row, column, first = tile_row * TILE, tile_column * WIDE, expert * experts[3]
        position = _copy_term(
            a_desc, w_desc, left_ring, right_ring, full, empty, row, column, first, inner, position,
            RIGHT_TRANSPOSED, STEP, STAGES,
        )  # fmt: skip
        if other_desc is not None:
            position = _copy_term(
                other_desc, other_w_desc, left_ring, right_ring, full, empty, row, column, first, inner, position,
                RIGHT_TRANSPOSED, STEP, STAGES,
            )  # fmt: skip


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_desc, bias_ptr, left_ring, right_ring, places, full, empty, tile_rows, tile_columns,
    steps, columns, experts,
    RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    lanes = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    sent = 0
    position = 0
    for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
        tile_row, tile_column, expert = tile_of(index, tile_rows, tile_columns, experts, GROUP)
        column = tile_column * WIDE
        acc = gl.zeros([HALF, WIDE], gl.float32, layout)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + expert * columns + gl.minimum(column + lanes, columns - 1))
            acc += gl.expand_dims(bias.to(gl.float32), 0)
        acc = multiply(
            consumer, acc, left_ring, right_ring, full, empty, position, steps, False, RIGHT_TRANSPOSED, STAGES
        )
        position += steps
        sent = store(consumer, out_desc, tile_row * TILE + consumer * HALF, column, acc, places, sent, PLACES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["inner", "columns", "tile_columns", "expert_count", "weight_rows"])
def _pipelined_grouped_product_kernel(
    a_desc, w_desc, other_desc, other_w_desc, out_desc, bias_ptr, tile_expert_ptr, starts_ptr, inner, columns,
    tile_columns, expert_count, weight_rows,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 1 if other_desc is None else 2
    steps = PARTS * gl.cdiv(inner, STEP)
    experts = (tile_expert_ptr, starts_ptr, expert_count, weight_rows)
    tile_rows = rows_in_use(0, experts)
    left_ring, right_ring, full, empty = make_ring(a_desc, w_desc, False, RIGHT_TRANSPOSED, STEP, STAGES)
    places = gl.allocate_shared_memory(a_desc.dtype, [2 * PLACES, HALF, HALF], out_desc.layout)
    fence_async_shared()
    specialize(2, _consume, (
        out_desc, bias_ptr, left_ring, right_ring, places, full, empty, tile_rows, tile_columns, steps, columns,
        experts, RIGHT_TRANSPOSED, STAGES, PLACES, GROUP,
    ), _copy_terms, (
        a_desc, w_desc, other_desc, other_w_desc, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
        experts, RIGHT_TRANSPOSED, STEP, STAGES, GROUP,
    ))  # fmt: skip


def prepare_product(
    a: Matrix, weights: list[Matrix], columns: int, experts: int, config: CooperativePipeline
) -> Launch:
    """The launch for a left operand and the weights ``[experts, columns, inner]``, or two of each that lie alike.

    Its tensors are (a, weight, other a, other weight, result ``[rows, columns]``), and beside them the bias ``[experts,
    columns]``, the expert of each row of tiles, and where the rows of each expert begin.
    """
    half, wide = HALF.value, WIDE.value
    tile_rows, tile_columns = ceil_div(a.rows, TILE.value), ceil_div(columns, wide)
    right_transposed = not weights[0].transposed
    left = a.geometry(half, config.step)
    right = [weight.geometry(wide, config.step) for weight in weights]
    two = len(weights) == 2
    return Launch(
        _pipelined_grouped_product_kernel,
        min(tile_rows * tile_columns, config.programs),
        (a.columns, columns, tile_columns, experts, weights[0].step),
        (),
        (right_transposed, config.step, config.stages, config.places, config.group),
        geometries=(
            left,
            right[0],
            left if two else None,
            right[1] if two else None,
            dense(a.rows, columns, half, half),
        ),
    )
