"""The loss of each row of logits, and its gradient in the place of the logits.

Of a row with target y and class weights w (1 without), their sum W, and ``lse = top + log total``:

    loss = (1 - ε) w_y (lse - x_y) + ε / V (W lse - Σ_c w_c x_c) + z lse²
    dloss / dx_c = p_c ((1 - ε) w_y + ε / V W + 2 z lse) - (1 - ε) w_y [c = y] - ε / V w_c,  p_c = exp(x_c - lse)

Where y is ``ignore_index`` all of them are 0. Another y that is no column has the loss NaN, and so has its gradient.
"""

from typing import NamedTuple

import torch

from ..device import tl, triton
from ..launching import launch
from ..tuning.cross_entropy import RowTiles
from .rows import replace_by_gradient, row_statistics, values_and_slope


class LossArithmetic(NamedTuple):
    """What is computed besides the tensors; ``accuracy`` is that of exponentials and of the softcap's tanh."""

    ignore_index: int
    accuracy: str
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def numbers(self) -> tuple[int | float, ...]:
        """What the kernels take of it as numbers."""
        cap = 1.0 if self.softcap is None else self.softcap
        return (
            self.ignore_index, float(self.label_smoothing), float(self.z_loss), float(self.logit_scale), cap, 1.0 / cap
        )  # fmt: skip


@triton.jit
def class_weight(target, weight_ptr, V):
    """The weight of the target's class, NaN of a target that is no column."""
    known = (target >= 0) & (target < V)
    weight = tl.where(known, 1.0, float("nan"))
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + target, mask=known, other=float("nan"))
    return weight


@triton.jit
def _weight_sum(weight_sum_ptr, V):
    if weight_sum_ptr is not None:
        return tl.load(weight_sum_ptr)
    else:
        return V * 1.0


@triton.jit
def loss_of(
    top, log_total, x_target, weighted, weight, weight_sum_ptr, V, smoothing, z_loss, SMOOTHING: tl.constexpr
):  # fmt: skip
    """The loss of a row by its statistics, its target's value and the weight of its class."""
    lse = top + log_total
    # The square of a large logit may be infinite.
    loss = weight * (1.0 - smoothing) * ((top - x_target) + log_total)
    loss += tl.where(z_loss > 0.0, z_loss * lse * lse, 0.0)
    if SMOOTHING:
        loss += smoothing / V * (_weight_sum(weight_sum_ptr, V) * lse - weighted)
    return loss


@triton.jit
def gradient_factors(
    upstream, counts, weight, weight_sum_ptr, top, log_total, V, smoothing, z_loss, SMOOTHING: tl.constexpr
):  # fmt: skip
    """(by_share, by_target, by_weight) of ``gradient_of`` for shares of 1, of a row's loss times ``upstream``."""
    # Of a token that does not count all are 0, whatever its weight is; times a NaN among the logits that is NaN.
    upstream = tl.where(counts, upstream, 0.0)
    by_target = tl.where(counts, weight * (1.0 - smoothing) * upstream, 0.0)
    by_weight = smoothing / V * upstream
    by_share = by_target + tl.where(counts, 2.0 * z_loss * (top + log_total) * upstream, 0.0)
    if SMOOTHING:
        by_share += by_weight * _weight_sum(weight_sum_ptr, V)
    return by_share, by_target, by_weight


@triton.jit(
    do_not_specialize=["M", "ignore_index", "smoothing", "z_loss", "scale", "softcap", "inverse_cap", "gradient"]
)  # fmt: skip
def _losses_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, factor_ptr, loss_ptr, statistics_ptr,
    length, V, M, ignore_index, smoothing, z_loss, scale, softcap, inverse_cap, gradient,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * length
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    weight = class_weight(target, weight_ptr, V)
    # Read before anything is written in its place.
    x_target, _ = values_and_slope(
        row_ptr, tl.minimum(tl.maximum(target, 0), V - 1), V, length, scale, softcap, inverse_cap, SOFTCAP, ACCURACY
    )
    top, total, weighted = row_statistics(
        row_ptr, weight_ptr, V, length, scale, softcap, inverse_cap, BLOCK, SMOOTHING, SOFTCAP, ACCURACY
    )
    log_total = tl.log(total)
    loss = loss_of(top, log_total, x_target, weighted, weight, weight_sum_ptr, V, smoothing, z_loss, SMOOTHING)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    if statistics_ptr is not None:
        tl.store(statistics_ptr + row, top)
        tl.store(statistics_ptr + M + row, total)
    # No constant: one kernel with and without gradients gives the same bits.
    if gradient != 0:
        factor = 1.0
        if factor_ptr is not None:
            factor = tl.load(factor_ptr)
        by_share, by_target, by_weight = gradient_factors(
            factor, counts, weight, weight_sum_ptr, top, log_total, V, smoothing, z_loss, SMOOTHING
        )
        replace_by_gradient(
            row_ptr, weight_ptr, target, top, total, by_share, by_target, by_weight, V, length, scale, softcap,
            inverse_cap, BLOCK, SMOOTHING, SOFTCAP, ACCURACY,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["M", "ignore_index", "smoothing", "z_loss", "scale", "softcap", "inverse_cap"]
)  # fmt: skip
def _losses_gradient_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, upstream_ptr, statistics_ptr,
    length, V, M, ignore_index, smoothing, z_loss, scale, softcap, inverse_cap,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    weight = class_weight(target, weight_ptr, V)
    top = tl.load(statistics_ptr + row)
    total = tl.load(statistics_ptr + M + row)
    by_share, by_target, by_weight = gradient_factors(
        tl.load(upstream_ptr + row), counts, weight, weight_sum_ptr, top, tl.log(total), V, smoothing, z_loss, SMOOTHING
    )
    replace_by_gradient(
        logits_ptr + row * length, weight_ptr, target, top, total, by_share, by_target, by_weight, V, length, scale,
        softcap, inverse_cap, BLOCK, SMOOTHING, SOFTCAP, ACCURACY,
    )  # fmt: skip


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

    What lies between two rows of logits may be overwritten, also behind the last one: the kernels take rows as long as
    the stride between them, of whole vectors where this is a multiple of 16.

    ``weight``, float32 ``[V]``, and ``weight_sum``, its sum, are those of the classes. ``statistics`` ``[2, M]``, top
    and total, are filled where they are given; their two rows may be parts of longer ones. ``gradient`` puts that of
    ``factor · Σ loss`` in the place of the logits.
    """
    launch(
        _losses_kernel,
        logits.shape[0],
        (logits, target, weight, weight_sum, factor, loss, statistics),
        (logits.stride(0), logits.shape[1]),
        (0 if statistics is None else statistics.stride(0), *arithmetic.numbers(), int(gradient)),
        (tiles.block, arithmetic.label_smoothing > 0, arithmetic.softcap is not None, arithmetic.accuracy),
        tiles.num_warps,
    )


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
    """Puts the gradient of ``Σ upstream · loss`` in the place of the logits.

    What the loss is, how rows lie, and the ``statistics`` that it left behind: see :func:`losses`.
    """
    launch(
        _losses_gradient_kernel,
        logits.shape[0],
        (logits, target, weight, weight_sum, upstream, statistics),
        (logits.stride(0), logits.shape[1]),
        (statistics.stride(0), *arithmetic.numbers()),
        (tiles.block, arithmetic.label_smoothing > 0, arithmetic.softcap is not None, arithmetic.accuracy),
        tiles.num_warps,
    )
