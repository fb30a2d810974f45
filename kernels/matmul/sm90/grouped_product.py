"""Grouped products on Hopper: rows sorted by expert times their experts' weights, or the sum of two such products."""

from ...hopper import Matrix, Resource, dense, fence_async_shared, gl, gluon, resources
from ...launching import Launch, ceil_div
from ...tuning.grouped_gemm_pipelines import COOPERATIVE_COLUMNS, CooperativePipeline
from .cooperative import cooperative_ring, store_rows, store_tiles
from .elements import bias_of_columns
from .loading import Term, load_tiles
from .ring import HALF, TILE, make_staging
from .roles import warp_specialize
from .schedules import make_schedule

WIDE = gl.constexpr(COOPERATIVE_COLUMNS)


@resources("out bias_ptr columns staging")
class _Output(Resource):
    """What the epilogue reads and writes besides the product."""


@gluon.jit
def _bias(consumer: gl.constexpr, tile, given):
    _, column, expert = tile
    return bias_of_columns(given.bias_ptr, expert * given.columns, column, given.columns, WIDE), 0


@gluon.jit
def _store(consumer: gl.constexpr, tile, acc, loaded, given, stored):
    row, column, _ = tile
    return store_rows(consumer, given.out, row + consumer * HALF, column, acc, given.staging, stored)


@gluon.jit(do_not_specialize=["inner", "columns", "tile_columns", "expert_count", "weight_rows"])
def _sm90_grouped_product_kernel(
    a_desc, w_desc, other_desc, other_w_desc, out_desc, bias_ptr, tile_expert_ptr, starts_ptr, inner, columns,
    tile_columns, expert_count, weight_rows,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 1 if other_desc is None else 2
    schedule = make_schedule(0, tile_columns, GROUP, tile_expert_ptr, starts_ptr, expert_count, weight_rows, WIDE)
    ring = cooperative_ring(a_desc, w_desc, WIDE, False, RIGHT_TRANSPOSED, STEP, STAGES)
    given = _Output(out=out_desc, bias_ptr=bias_ptr, columns=columns, staging=make_staging(out_desc, SLOTS))
    term = Term(left=a_desc, right=w_desc, other=None, inner=inner, first=0)
    other_term = Term(left=other_desc, right=other_w_desc, other=None, inner=inner, first=0)
    fence_async_shared()
    warp_specialize(
        2, store_tiles, (_bias, _store, ring, schedule, PARTS * gl.cdiv(inner, STEP), given),
        load_tiles, (ring, schedule, term, other_term),
    )  # fmt: skip


def prepare_product(
    a: Matrix, weights: list[Matrix], columns: int, experts: int, config: CooperativePipeline
) -> Launch:
    """The launch for a left operand and weights ``[experts, columns, inner]``, or for two of each with equal layouts.

    Its tensors are (a, weight, other a, other weight, result ``[rows, columns]``, bias ``[experts, columns]``, expert
    of each row of tiles, first row of each expert).
    """
    half, wide = HALF.value, WIDE.value
    tile_rows, tile_columns = ceil_div(a.rows, TILE.value), ceil_div(columns, wide)
    right_transposed = not weights[0].transposed
    left = a.geometry(half, config.step)
    right = [weight.geometry(wide, config.step) for weight in weights]
    two = len(weights) == 2
    return Launch(
        _sm90_grouped_product_kernel,
        min(tile_rows * tile_columns, config.programs),
        (a.columns, columns, tile_columns, experts, weights[0].step),
        (),
        (right_transposed, config.step, config.stages, config.slots, config.group),
        geometries=(
            left,
            right[0],
            left if two else None,
            right[1] if two else None,
            dense(a.rows, columns, half, half),
        ),
    )
