"""The gradient of some columns of the logits on Hopper: the product of the forward pass again, and its epilogue."""

from ...hopper import Resource, fence_async_shared, gl, gluon, resources
from ...matmul.sm90.cooperative import cooperative_ring, store_tiles
from ...matmul.sm90.elements import bias_of_columns
from ...matmul.sm90.loading import Term, load_tiles
from ...matmul.sm90.ring import HALF, column_halves, make_staging, tma_store
from ...matmul.sm90.roles import warp_specialize
from ...matmul.sm90.schedules import dense_schedule
from ..elements import logits_of
from ..tile import Gradient, gradient_of_tile, gradients_of_rows


@resources("out bias_ptr gradient scales staging COLUMNS ARITHMETIC")
class _Logits(Resource):
    """What the epilogue reads and writes besides the product."""


@gluon.jit
def _prologue(consumer: gl.constexpr, tile, given):
    """The bias, and the target's column and the gradient's factors for the rows of the consumer."""
    row, column, _ = tile
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows = row + consumer * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    acc = bias_of_columns(given.bias_ptr, 0, column, given.gradient.V, given.COLUMNS)
    target, top, factors = gradients_of_rows(rows, given.gradient)
    # Columns are compared in 32 bits; a target that is none of these becomes -1.
    target = gl.where((target >= 0) & (target < given.gradient.V), target, -1).to(gl.int32)
    return acc, (target, top, factors)


@gluon.jit
def _store_gradient(consumer: gl.constexpr, c, row, column, of_rows, given, stored):
    """Store the gradient of the logits from ``column`` on, 64 columns at a time."""
    if c.shape[1] > HALF:
        left, right = column_halves(c)
        stored = _store_gradient(consumer, left, row, column, of_rows, given, stored)
        stored = _store_gradient(consumer, right, row, column + c.shape[1] // 2, of_rows, given, stored)
    else:
        cols = column + gl.arange(0, HALF, gl.SliceLayout(0, c.type.layout))
        x, slope = logits_of(c, given.scales, given.ARITHMETIC)
        gradient = gradient_of_tile(x, slope, cols, of_rows, given.gradient, "hardware")
        if column + HALF > given.gradient.V:
            gradient = gl.where(gl.expand_dims(cols < given.gradient.V, 0), gradient, 0.0)
        stored = tma_store(consumer, given.out, row, column, gradient, given.staging, stored)
    return stored


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, acc, of_rows, given, stored):
    row, column, _ = tile
    return _store_gradient(consumer, acc, row + consumer * HALF, column, of_rows, given, stored)


@gluon.jit(do_not_specialize=["M", "bands", "start", "scales"])
def sm90_logit_gradient_kernel(
    x_desc, w_desc, out_desc, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr,
    by_logarithm_ptr, inner, V, tile_columns, M, bands, start, scales,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, GROUP: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    schedule = dense_schedule(bands, tile_columns, GROUP, COLUMNS)
    ring = cooperative_ring(x_desc, w_desc, COLUMNS, False, True, STAGES.step, STAGES.stages, 2, 1)
    gradient = Gradient(
        target_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr, by_logarithm_ptr, M, V, start
    )  # fmt: skip
    given = _Logits(
        out=out_desc, bias_ptr=bias_ptr, gradient=gradient, scales=scales, staging=make_staging(out_desc, STAGES.slots),
        COLUMNS=COLUMNS, ARITHMETIC=ARITHMETIC,
    )  # fmt: skip
    term = Term(left=x_desc, right=w_desc, other=None, inner=inner, first=0)
    fence_async_shared()
    warp_specialize(
        2, store_tiles, (_prologue, _epilogue, ring, schedule, gl.cdiv(inner, STAGES.step), given, LEAD),
        load_tiles, (ring, schedule, term),
    )  # fmt: skip
