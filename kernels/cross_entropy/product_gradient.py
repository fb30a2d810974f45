"""The gradient of some columns of the logits from the product ``input linear_weightᵀ``, which is computed again.

Every row has the statistics that ``losses_of_product`` computed, and factors that follow from them, from the target and
from the upstream gradients: see ``gradient_of``. With entropies H the gradient of a row is

    p_c (g + h (x_c - top - Σ_c p_c (x_c - top))) - g [c = y],  g upstream of the loss, -h of the entropy,

which takes one more factor, ``by_logarithm``: the sum is ``log total - H``, and becomes a part of ``by_share``.
"""

import torch

from ..device import tl, triton
from ..gemm_reduce.operands import scores
from ..hopper import dense, untransposed
from ..launching import ceil_div, launch
from ..matmul.generic.operands import Operand
from ..matmul.sm90.ring import Stages
from ..tiles import grouped_tile, load_vector, store_tile
from ..tuning import CONSUMER_ROWS
from ..tuning.cross_entropy import LogitTiles
from .elements import Loss, LossArithmetic, class_weight, gradient_factors, logits_of
from .sm90.gradient import sm90_logit_gradient_kernel
from .tile import Gradient, gradient_of_tile, gradients_of_rows

# Rows per program of the factors.
_ROWS = 128
# Tile rows in a swizzle group.
_GROUP = 8


@triton.jit(do_not_specialize=["M", "numbers"])
def _row_factors_kernel(
    target_ptr, weight_ptr, weight_sum_ptr, upstream_ptr, statistics_ptr, entropy_ptr, entropy_upstream_ptr,
    by_share_ptr, by_target_ptr, by_weight_ptr, by_logarithm_ptr, V, M, numbers,
    ROWS: tl.constexpr,
):  # fmt: skip
    SMOOTHING: tl.constexpr = by_weight_ptr is not None
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    target = tl.load(target_ptr + rows, mask=inside, other=-1)
    top = tl.load(statistics_ptr + rows, mask=inside, other=0.0)
    total = tl.load(statistics_ptr + M + rows, mask=inside, other=1.0)
    upstream = tl.load(upstream_ptr + rows, mask=inside, other=0.0)
    loss = Loss(weight_ptr, weight_sum_ptr, V, numbers[1], numbers[2])
    counts = target != numbers[0]
    log_total = tl.log(total)
    factors = gradient_factors(upstream, counts, class_weight(target, loss), top, log_total, loss, SMOOTHING)
    by_share = factors.by_share
    if by_logarithm_ptr is not None:
        entropy = tl.load(entropy_ptr + rows, mask=inside, other=0.0)
        by_logarithm = tl.where(counts, -tl.load(entropy_upstream_ptr + rows, mask=inside, other=0.0), 0.0)
        by_share += tl.where(counts, by_logarithm * (entropy - log_total), 0.0)
        tl.store(by_logarithm_ptr + rows, by_logarithm / total, mask=inside)
    tl.store(by_share_ptr + rows, by_share / total, mask=inside)
    tl.store(by_target_ptr + rows, factors.by_target, mask=inside)
    if SMOOTHING:
        tl.store(by_weight_ptr + rows, factors.by_weight, mask=inside)


@triton.jit(do_not_specialize=["M", "bands", "start", "scales", "zero"])
def _logit_gradient_kernel(
    x_ptr, linear_ptr, out_ptr, target_ptr, bias_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr,
    by_logarithm_ptr, x_strides, linear_strides, V, columns, tile_columns, M, bands, start, scales, zero,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    GROUP: tl.constexpr, ARITHMETIC: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    band, tile = grouped_tile(tl.program_id(0), bands, tile_columns, GROUP)
    rows = band * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    left = Operand(x_ptr, 0, x_strides[0], x_strides[1], M, K)
    right = Operand(linear_ptr, 0, linear_strides[0], linear_strides[1], V, K)
    c = scores(left, right, rows, cols, zero, K, BLOCK_K, False, EVEN_N, INPUT_PRECISION)
    if bias_ptr is not None:
        c += load_vector(bias_ptr, cols, 1, V)[None, :]
    given = Gradient(
        target_ptr, weight_ptr, top_ptr, by_share_ptr, by_target_ptr, by_weight_ptr, by_logarithm_ptr, M, V, start
    )  # fmt: skip
    x, slope = logits_of(c, scales, ARITHMETIC)
    gradient = gradient_of_tile(x, slope, cols, gradients_of_rows(rows, given), given, ACCURACY)
    gradient = tl.where((cols < V)[None, :], gradient, 0.0)
    store_tile(out_ptr, gradient, rows, cols, columns, 1, M, columns)


def row_factors(
    target: torch.Tensor,
    weight: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    classes: int,
    arithmetic: LossArithmetic,
    statistics: torch.Tensor,
    upstream: torch.Tensor,
    entropy: torch.Tensor | None = None,
    entropy_upstream: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The ``factors`` of :func:`gradient_of_product`, for ``classes`` classes and upstream gradients ``[M]``.

    ``statistics`` ``[2, M]`` and ``entropy`` ``[M]`` are those of ``losses_of_product``; upstream gradients are
    contiguous and float32.
    """
    rows, smoothed = target.shape[0], arithmetic.label_smoothing > 0
    by_share, by_target, *more = statistics.new_empty(2 + smoothed + (entropy_upstream is not None), rows).unbind()
    by_weight = more.pop(0) if smoothed else None
    factors = (by_share, by_target, by_weight, more.pop() if more else None)
    launch(
        _row_factors_kernel,
        ceil_div(rows, _ROWS),
        (
            target, weight, weight_sum, upstream, statistics,
            None if entropy_upstream is None else entropy, entropy_upstream, *factors,
        ),
        (classes,),
        (rows, arithmetic.numbers),
        (_ROWS,),
    )  # fmt: skip
    return factors


def gradient_of_product(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    top: torch.Tensor,
    factors: tuple[torch.Tensor | None, ...],
    start: int,
    arithmetic: LossArithmetic,
    input_precision: str,
    tiles: LogitTiles,
    *,
    out: torch.Tensor,
) -> None:
    """Fills ``out``, contiguous ``[M, C]``: the gradient of the logits of C classes, with zeros past the last of them.

    linear_weight ``[≤ C, K]``, linear_bias and weight are those of these classes, the first of which is number
    ``start``. ``top`` ``[M]`` is the first of the statistics, ``factors`` are those of :func:`row_factors`. For the
    sm90 kernel C must be a multiple of 16 bytes.
    """
    (rows, width), columns, classes = input.shape, out.shape[1], linear_weight.shape[0]
    *_, by_weight, by_logarithm = factors
    bias = None if linear_bias is None else linear_bias.contiguous()
    vectors = (target, bias, None if by_weight is None else weight, top, *factors)
    # Gradients of entropies and of a softcap together take more registers than the sm90 kernel has left.
    pipeline = None if arithmetic.softcap is not None and by_logarithm is not None else tiles.sm90
    x, w = untransposed(input), untransposed(linear_weight)
    if pipeline is None or x is None or w is None:
        bands, tile_columns = ceil_div(rows, tiles.block_m), ceil_div(columns, tiles.block_n)
        launch(
            _logit_gradient_kernel,
            bands * tile_columns,
            (input, linear_weight, out, *vectors),
            (input.stride(), linear_weight.stride(), classes, columns, tile_columns),
            (rows, bands, start, arithmetic.scales, 0.0),
            (
                width, tiles.block_m, tiles.block_n, tiles.block_inner, classes % tiles.block_n == 0, _GROUP,
                arithmetic.constants, input_precision,
            ),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip
    else:
        bands, tile_columns = ceil_div(rows, 2 * CONSUMER_ROWS), ceil_div(columns, pipeline.columns)
        launch(
            sm90_logit_gradient_kernel,
            min(pipeline.programs, bands * tile_columns),
            (x.tensor, w.tensor, out, *vectors),
            (width, classes, tile_columns),
            (rows, bands, start, arithmetic.scales),
            (
                pipeline.columns, Stages(pipeline.step, pipeline.stages, pipeline.slots), pipeline.lead,
                pipeline.group, arithmetic.constants,
            ),
            geometries=(
                x.geometry(CONSUMER_ROWS, pipeline.step), w.geometry(pipeline.columns, pipeline.step),
                dense(rows, columns, CONSUMER_ROWS, CONSUMER_ROWS),
            ),
        )  # fmt: skip
