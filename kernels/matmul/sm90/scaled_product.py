"""The product of two 8-bit operands with scales on Hopper, summed over parts of its inner axis.

Tensor cores keep about 14 bits of a sum of 8-bit products, and drop what a product has below them: a long sum loses
what its terms have in common, 3 % of 16,384 equal terms. So sums begin anew after every ``PART`` terms, and the parts
are added up outside.
"""

from ...hopper import Matrix, Resource, fence_async_shared, gl, gluon, resources, tma
from ...launching import Launch, ceil_div
from ...tuning import EpiloguePipeline
from ..low_rank import columns_of_step
from .elements import Scales, row_scales_of_tile, scaled
from .loading import Term, load_parts
from .pingpong import dense_launch, mma_parts, pingpong_ring
from .ring import HALF, TILE, make_staging, tma_store, with_low_rank
from .roles import warp_specialize
from .schedules import make_schedule

# Terms that the tensor cores sum up.
PART = 2048


@resources("out bias_ptr columns scales staging")
class _Product(Resource):
    """What the epilogue reads and writes: the result, its bias and scales."""


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, quarters, given, stored):
    row, column, expert = tile
    left, right, lower_left, lower_right = quarters
    scales = given.scales
    row_scales, lower_scales = row_scales_of_tile(scales, row)
    # Loops, so that the code of a quarter exists once: see the hidden's gradient.
    for half in range(2):
        for side in range(2):
            first_row, first = row + half * HALF, column + side * HALF
            value = scaled(
                left, row_scales, first, scales, scales.columns_ptr, given.bias_ptr, expert * given.columns,
                given.columns,
            )  # fmt: skip
            stored = tma_store(consumer, given.out, first_row, first, value, given.staging, stored)
            left = right
        left, right, row_scales = lower_left, lower_right, lower_scales
    return stored


@gluon.jit
def _consume(consumer: gl.constexpr, ring, schedule, steps, parts, given):
    stored = 0
    mma_parts(consumer, ring, schedule, steps, parts, _epilogue, given, stored)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tile_rows", "rows", "experts"])
def _sm90_scaled_product_kernel(
    left_desc, right_desc, u_desc, b_desc, out_desc, bias_ptr, left_scale_ptr, right_scale_ptr, tile_expert_ptr,
    starts_ptr, inner, columns, tile_columns, tile_rows, rows, experts,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SCALE_STRIDES: gl.constexpr, PART_STEPS: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    # Parts of equal length, as many as needed.
    parts = gl.cdiv(gl.cdiv(inner, STEP), PART_STEPS)
    steps = gl.cdiv(gl.cdiv(inner, STEP), parts)
    schedule = make_schedule(tile_rows, tile_columns, GROUP, tile_expert_ptr, starts_ptr, experts[0], experts[1], TILE)
    ring = pingpong_ring(left_desc, right_desc, RIGHT_TRANSPOSED, STEP, STAGES)
    ring = with_low_rank(ring, u_desc, b_desc, RANK[0], RANK[1])
    given = _Product(
        out=out_desc, bias_ptr=bias_ptr, columns=columns,
        scales=Scales(
            rows_ptr=left_scale_ptr, columns_ptr=right_scale_ptr, gate_ptr=None, rows=rows, ROW_STRIDE=SCALE_STRIDES[0],
            COLUMN_STRIDE=SCALE_STRIDES[1],
        ),
        staging=make_staging(out_desc, SLOTS),
    )  # fmt: skip
    term = Term(left=left_desc, right=right_desc, other=None, inner=inner, first=0)
    low_rank = Term(left=u_desc, right=b_desc, other=None, inner=RANK[0], first=0)
    fence_async_shared()
    warp_specialize(
        2, _consume, (ring, schedule, steps, parts, given), load_parts, (ring, schedule, term, low_rank, steps, parts)
    )


def prepare_scaled_product(
    left: Matrix,
    right: Matrix,
    out: Matrix,
    pipeline: EpiloguePipeline,
    low_rank: tuple[Matrix, Matrix] | None = None,
    experts: int = 0,
) -> Launch:
    """The launch for left ``[M, K]``, right ``[K, N]``, whose columns are contiguous, and their product ``[M, N]``.

    Its tensors are left, right, those of a ``low_rank`` product of 16 bits, the result, the bias, the scales of left's
    rows and of right's columns, the expert of each row of tiles, and the first row of each expert. With ``experts``,
    rows are sorted by expert, and right stacks the weights of all experts.
    """
    rank = 0, 0
    terms = [(left, right)]
    if low_rank is not None:
        terms.append(low_rank)
        columns, step = low_rank[0].columns, pipeline.low_rank_step
        # Whole steps, for fewer variants: TMA loads zeros beyond the end.
        rank = ceil_div(columns, step) * step, columns_of_step(columns, step)
    constants = (left.scale_stride, right.scale_stride), PART // pipeline.step, rank
    free = ((experts, right.step),)
    return dense_launch(_sm90_scaled_product_kernel, terms, out, pipeline, constants, most_terms=2, free=free)
