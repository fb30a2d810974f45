"""The loss of each row of logits, and its gradient, which overwrites the logits: see ``elements.py``.

A row's statistics are its largest value ``top`` and ``total = Σ_c exp(x_c - top)``: two numbers, because rounding
``top + log total`` to one would lose the loss of a token that is almost certain.
"""

from collections import namedtuple

import torch

from ..device import tl, triton
from ..gemm_reduce.operands import exponential
from ..launching import launch
from ..tuning.cross_entropy import RowTiles
from .elements import (
    LOWEST,
    Factors,
    Loss,
    LossArithmetic,
    class_weight,
    gradient_factors,
    gradient_of,
    logits_of,
    loss_of,
)

# A row of V logits, which takes ``length`` elements in memory.
_Row = namedtuple("_Row", "ptr V length scales")


@triton.jit
def _values_and_slope(row, cols, ARITHMETIC: tl.constexpr):
    """x at ``cols``, -inf from column V on, and its slope in the logits.

    All ``length`` elements of a row are read, as whole vectors: V need not be a multiple of a vector.
    """
    value = tl.load(row.ptr + cols, mask=cols < row.length, other=0.0).to(tl.float32)
    value, slope = logits_of(value, row.scales, ARITHMETIC)
    return tl.where(cols < row.V, value, -float("inf")), slope


@triton.jit
def _statistics(row, weight_ptr, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, ARITHMETIC: tl.constexpr):
    """(top, total, Σ_c w_c x_c) of a row; the last is 0 without SMOOTHING.

    Each lane has its own maximum and sums, so that nothing crosses lanes before the end. A new value takes a single
    exponential, of its distance from the lane's maximum.
    """
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, row.V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x, _ = _values_and_slope(row, cols, ARITHMETIC)
        distance = x - top
        share = exponential(-tl.abs(distance), ACCURACY)
        rises = distance > 0
        total = tl.where(rises, total * share + 1.0, total + share)
        top = tl.where(rises, x, top)
        if SMOOTHING:
            inside = cols < row.V
            x = tl.where(inside, x, 0.0)
            if weight_ptr is not None:
                x *= tl.load(weight_ptr + cols, mask=inside, other=0.0)
            weighted += x
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * exponential(top - row_top, ACCURACY), 0)
    return row_top, row_total, tl.sum(weighted, 0)


@triton.jit
def _replace_by_gradient(
    row, weight_ptr, target, top, total, factors,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Overwrite the row with its gradient (``gradient_of``); the factors are per share p.

    All ``length`` elements of the row are written, with zeros from column V on.
    """
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    factors = Factors(factors.by_share * (1.0 / total), factors.by_target, factors.by_weight, 0.0)
    for first in tl.range(0, row.V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x, slope = _values_and_slope(row, cols, ARITHMETIC)
        class_weights = 1.0
        if SMOOTHING and weight_ptr is not None:
            class_weights = tl.load(weight_ptr + cols, mask=cols < row.V, other=0.0)
        g = gradient_of(x, slope, cols == target, class_weights, top, factors, False, SMOOTHING, ACCURACY)
        g = tl.where(cols < row.V, g, 0.0)
        tl.store(row.ptr + cols, g.to(row.ptr.dtype.element_ty), mask=cols < row.length)


@triton.jit(do_not_specialize=["M", "numbers", "scales", "gradient"])
def _losses_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, upstream_ptr, loss_ptr, statistics_ptr,
    length, V, M, numbers, scales, gradient,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # With a loss, the upstream gradient is one for all rows, or None for 1. Without a loss, statistics are given, and
    # every row has its own upstream gradient.
    row = tl.program_id(0).to(tl.int64)
    logits = _Row(logits_ptr + row * length, V, length, scales)
    loss = Loss(weight_ptr, weight_sum_ptr, V, numbers[1], numbers[2])
    target = tl.load(target_ptr + row)
    counts = target != numbers[0]
    weight = class_weight(target, loss)
    if loss_ptr is not None:
        # Read before the gradient overwrites it.
        x_target, _ = _values_and_slope(logits, tl.minimum(tl.maximum(target, 0), V - 1), ARITHMETIC)
        top, total, weighted = _statistics(logits, weight_ptr, BLOCK, SMOOTHING, ARITHMETIC)
        log_total = tl.log(total)
        found = loss_of(top, log_total, x_target, weighted, weight, loss, SMOOTHING)
        tl.store(loss_ptr + row, tl.where(counts, found, 0.0))
        if statistics_ptr is not None:
            tl.store(statistics_ptr + row, top)
            tl.store(statistics_ptr + M + row, total)
    else:
        top = tl.load(statistics_ptr + row)
        total = tl.load(statistics_ptr + M + row)
        log_total = tl.log(total)
    # Not a constexpr: one kernel with and without gradients gives the same bits.
    if gradient != 0:
        upstream = 1.0
        if loss_ptr is None:
            upstream = tl.load(upstream_ptr + row)
        elif upstream_ptr is not None:
            upstream = tl.load(upstream_ptr)
        factors = gradient_factors(upstream, counts, weight, top, log_total, loss, SMOOTHING)
        _replace_by_gradient(logits, weight_ptr, target, top, total, factors, BLOCK, SMOOTHING, ARITHMETIC)


def losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    arithmetic: LossArithmetic,
    tiles: RowTiles,
    *,
    loss: torch.Tensor,
    statistics: torch.Tensor | None = None,
    gradient: bool = False,
    factor: torch.Tensor | None = None,
) -> None:
    """Fills ``loss``, float32 ``[M]``, for logits ``[M, V]`` and int64 targets ``[M]``.

    The memory between two rows of logits, and after the last, may be overwritten: the kernels treat rows as long as
    the stride between them, in whole vectors if that is a multiple of 16.

    ``weight``, float32 ``[V]``, and ``weight_sum``, its sum, are those of the classes. ``statistics`` ``[2, M]``, top
    and total, are filled if given; their two rows may be parts of longer ones. With ``gradient``, that of
    ``factor · Σ loss`` overwrites the logits.
    """
    _launch(logits, (target, weight, weight_sum, factor, loss, statistics), gradient, arithmetic, tiles)


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    arithmetic: LossArithmetic,
    tiles: RowTiles,
    *,
    statistics: torch.Tensor,
    upstream: torch.Tensor,
) -> None:
    """Overwrites the logits with the gradient of ``Σ upstream · loss``.

    ``statistics`` are those that :func:`losses` filled; the other arguments are as there.
    """
    _launch(logits, (target, weight, weight_sum, upstream, None, statistics), True, arithmetic, tiles)


def _launch(
    logits: torch.Tensor,
    vectors: tuple[torch.Tensor | None, ...],
    gradient: bool,
    arithmetic: LossArithmetic,
    tiles: RowTiles,
) -> None:
    """``vectors`` are those of the kernel's signature."""
    statistics = vectors[-1]
    launch(
        _losses_kernel,
        logits.shape[0],
        (logits, *vectors),
        (logits.stride(0), logits.shape[1]),
        (0 if statistics is None else statistics.stride(0), arithmetic.numbers, arithmetic.scales, int(gradient)),
        # One kernel for any scale: it is bound by memory, and a product with 1 costs nothing.
        (tiles.block, arithmetic.label_smoothing > 0, arithmetic.constants._replace(scaled=True)),
        tiles.num_warps,
    )
