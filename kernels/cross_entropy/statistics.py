"""Losses from the product ``input linear_weightᵀ``, each tile of which is reduced in registers and never stored.

The statistics of a row (``losses.py``) are computed for ranges of its columns: the largest value ``top``,
``total = Σ_c exp(x_c - top)``, on request ``spread = Σ_c exp(x_c - top) (x_c - top)``, ``weighted = Σ_c w_c x_c`` and
``index``, the first column of ``top``, and the target's value ``chosen``. A second kernel combines the ranges, always
in the same order.
"""

import torch

from ..device import tl, triton
from ..gemm_reduce.operands import exponential, scores
from ..hopper import untransposed
from ..launching import ceil_div, launch
from ..matmul.generic.operands import Operand
from ..matmul.sm90.ring import Stages
from ..tiles import load_vector
from ..tuning import CONSUMER_ROWS
from ..tuning.cross_entropy import LogitTiles, Shares, generic_shares, sm90_shares
from .elements import LOWEST, Loss, LossArithmetic, class_weight, logits_of, loss_of
from .sm90.statistics import sm90_statistics_kernel
from .tile import NOWHERE, Partials, add_tile, first_column, first_largest, ranges_of, store_statistics

# Rows per program of the second kernel, which divide every band; and ranges that it loads at a time.
_ROWS, _RANGES = tl.constexpr(32), tl.constexpr(32)


@triton.jit(do_not_specialize=["M", "bands", "scales", "zero"])
def _statistics_kernel(
    x_ptr, linear_ptr, target_ptr, bias_ptr, weight_ptr, top_ptr, total_ptr, spread_ptr, weighted_ptr, index_ptr,
    chosen_ptr, x_strides, linear_strides, V, tile_columns, ranges, M, bands, scales, zero,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    ARITHMETIC: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    ENTROPY: tl.constexpr = spread_ptr is not None
    SMOOTHING: tl.constexpr = weighted_ptr is not None
    INDEXED: tl.constexpr = index_ptr is not None
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    program = tl.program_id(0)
    band = program % bands
    own = program // bands
    rows = band * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(target_ptr + rows, mask=rows < M, other=-1)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)
    chosen = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M], tl.int32)
    index = tl.zeros([BLOCK_M], tl.int32) + own * BLOCK_N
    for tile in tl.range(own, tile_columns, ranges):
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        left = Operand(x_ptr, 0, x_strides[0], x_strides[1], M, K)
        right = Operand(linear_ptr, 0, linear_strides[0], linear_strides[1], V, K)
        x = scores(left, right, rows, cols, zero, K, BLOCK_K, False, EVEN_N, INPUT_PRECISION)
        if bias_ptr is not None:
            x += load_vector(bias_ptr, cols, 1, V)[None, :]
        x, _ = logits_of(x, scales, ARITHMETIC)
        inside = (cols < V)[None, :]
        x = tl.where(inside, x, -float("inf"))
        hit = cols[None, :] == target[:, None]
        here = (target >= tile * BLOCK_N) & (target < tl.minimum(tile * BLOCK_N + BLOCK_N, V))
        chosen = tl.where(here, tl.sum(tl.where(hit, x, 0.0), 1), chosen)
        found = tl.where(here, 1, found)
        if SMOOTHING:
            shares = tl.where(inside, x, 0.0)
            if weight_ptr is not None:
                shares *= load_vector(weight_ptr, cols, 1, V)[None, :]
            weighted += tl.sum(shares, 1)
        if INDEXED:
            highest = tl.max(x, 1)
            index = first_largest(top, index, highest, first_column(x, cols, highest))
        top, total, spread = add_tile(x, top, total, spread, ENTROPY, ACCURACY)
    at = (band.to(tl.int64) * ranges + own) * BLOCK_M + tl.arange(0, BLOCK_M)
    partials = Partials(top_ptr, total_ptr, spread_ptr, weighted_ptr, index_ptr, chosen_ptr)
    store_statistics(partials, at, rows, top, total, spread, weighted, index, chosen, found)


@triton.jit(do_not_specialize=["M", "bands", "tile_columns", "programs", "group", "numbers"])
def _combined_losses_kernel(
    top_ptr, total_ptr, spread_ptr, weighted_ptr, index_ptr, chosen_ptr, target_ptr, weight_ptr, weight_sum_ptr,
    loss_ptr, entropy_ptr, statistics_ptr, argmax_ptr, V, M, bands, tile_columns, programs, group, numbers,
    BAND: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    ENTROPY: tl.constexpr = spread_ptr is not None
    SMOOTHING: tl.constexpr = weighted_ptr is not None
    first = tl.program_id(0) * _ROWS
    rows = first + tl.arange(0, _ROWS)
    ranges, place = ranges_of(first // BAND, bands, tile_columns, programs, group)
    start = place * BAND + first % BAND
    top = tl.full([_ROWS], LOWEST, tl.float32)
    total = tl.zeros([_ROWS], tl.float32)
    spread = tl.zeros([_ROWS], tl.float32)
    weighted = tl.zeros([_ROWS], tl.float32)
    index = tl.full([_ROWS], NOWHERE, tl.int32)
    for r in tl.range(0, ranges, _RANGES):
        here = r + tl.arange(0, _RANGES)
        at = start + (here.to(tl.int64) * BAND)[:, None] + tl.arange(0, _ROWS)[None, :]
        inside = (here < ranges)[:, None]
        tops = tl.load(top_ptr + at, mask=inside, other=LOWEST)
        totals = tl.load(total_ptr + at, mask=inside, other=0.0)
        highest = tl.max(tops, 0)
        if index_ptr is not None:
            indices = tl.load(index_ptr + at, mask=inside, other=NOWHERE)
            firsts = tl.min(tl.where((tops == highest[None, :]) | (indices < 0), indices, NOWHERE), 0)
            index = first_largest(top, index, highest, firsts)
        higher = tl.maximum(top, highest)
        changes = tl.maximum(tops - higher[None, :], LOWEST)
        # NaN where both are infinite, as in torch.
        factors = exponential(tops - higher[None, :], ACCURACY)
        change = tl.maximum(top - higher, LOWEST)
        factor = exponential(change, ACCURACY)
        if ENTROPY:
            spreads = tl.load(spread_ptr + at, mask=inside, other=0.0)
            spread = factor * (spread + change * total) + tl.sum(factors * (spreads + changes * totals), 0)
        total = factor * total + tl.sum(factors * totals, 0)
        if SMOOTHING:
            weighted += tl.sum(tl.load(weighted_ptr + at, mask=inside, other=0.0), 0)
        top = higher
    target = tl.load(target_ptr + rows, mask=rows < M, other=-1)
    counts = target != numbers[0]
    loss = Loss(weight_ptr, weight_sum_ptr, V, numbers[1], numbers[2])
    weight = class_weight(target, loss)
    # A target that is no column has no stored value.
    chosen = tl.load(chosen_ptr + rows, mask=(rows < M) & (target >= 0) & (target < V), other=float("nan"))
    log_total = tl.log(total)
    found = loss_of(top, log_total, chosen, weighted, weight, loss, SMOOTHING)
    tl.store(loss_ptr + rows, tl.where(counts, found, 0.0), mask=rows < M)
    if ENTROPY:
        tl.store(entropy_ptr + rows, tl.where(counts, log_total - spread / total, 0.0), mask=rows < M)
    if index_ptr is not None:
        # Without the mark of a NaN.
        tl.store(argmax_ptr + rows, (index & NOWHERE).to(tl.int64), mask=rows < M)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + rows, top, mask=rows < M)
        tl.store(statistics_ptr + M + rows, total, mask=rows < M)


def losses_of_product(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    arithmetic: LossArithmetic,
    input_precision: str,
    tiles: LogitTiles,
    ranges: int,
    *,
    loss: torch.Tensor,
    entropy: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
    argmax: torch.Tensor | None = None,
) -> None:
    """Fills ``loss``, float32 ``[M]``, for input ``[M, K]``, linear_weight ``[V, K]`` and int64 targets ``[M]``.

    ``weight``, float32 ``[V]``, and ``weight_sum``, its sum, are those of the classes. ``entropy`` ``[M]``,
    ``statistics`` ``[2, M]``, top and total, and ``argmax``, int64 ``[M]``, are filled if given. In the generic
    kernel ``ranges`` programs share a row; the sm90 kernel has its own number.
    """
    (rows, width), columns = input.shape, linear_weight.shape[0]
    smoothed, scales = arithmetic.label_smoothing > 0, arithmetic.scales
    bias = None if linear_bias is None else linear_bias.contiguous()
    # Weights of a tile's columns take more registers than the sm90 kernel has left.
    pipeline = None if smoothed and weight is not None else tiles.sm90
    requested = entropy is not None, smoothed, argmax is not None
    x, w = untransposed(input), untransposed(linear_weight)
    if pipeline is None or x is None or w is None:
        shares = generic_shares(tiles, rows, columns, ranges)
        partials = _partials(loss, *requested, shares)
        launch(
            _statistics_kernel,
            shares.bands * shares.programs,
            (input, linear_weight, target, bias, weight if smoothed else None, *partials),
            (input.stride(), linear_weight.stride(), columns, shares.tile_columns, shares.programs),
            (rows, shares.bands, scales, 0.0),
            (
                width, tiles.block_m, tiles.block_n, tiles.block_inner, columns % tiles.block_n == 0,
                arithmetic.constants, input_precision,
            ),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip
    else:
        shares = sm90_shares(pipeline, rows, columns)
        partials = _partials(loss, *requested, shares)
        launch(
            sm90_statistics_kernel,
            shares.programs,
            (x.tensor, w.tensor, target, bias, *partials),
            (width, columns, shares.tile_columns),
            (rows, shares.bands, shares.group, scales),
            (
                pipeline.columns, Stages(pipeline.step, pipeline.stages, 0), pipeline.lead, arithmetic.constants,
            ),
            geometries=(x.geometry(CONSUMER_ROWS, pipeline.step), w.geometry(pipeline.columns, pipeline.step)),
        )  # fmt: skip
    launch(
        _combined_losses_kernel,
        ceil_div(rows, _ROWS.value),
        (*partials, target, weight, weight_sum, loss, entropy, statistics, argmax),
        (columns,),
        (rows, *shares[1:], arithmetic.numbers),
        (shares.rows, arithmetic.accuracy),
    )


def _partials(
    loss: torch.Tensor, entropy: bool, smoothed: bool, indexed: bool, shares: Shares
) -> tuple[torch.Tensor | None, ...]:
    """Empty tensors for top, total, spread, weighted, index and chosen; None if not requested."""
    top, total, *more = loss.new_empty(2 + entropy + smoothed, shares.partials).unbind()
    spread = more.pop(0) if entropy else None
    weighted = more.pop() if smoothed else None
    index = loss.new_empty(shares.partials, dtype=torch.int32) if indexed else None
    return top, total, spread, weighted, index, torch.empty_like(loss)
