"""The arithmetic of a loss, and its device functions for single logits and for a row.

``x = softcap · tanh(scale · logits / softcap)``, without a cap ``scale · logits``. Of a row with target y and class
weights w (1 if there are none), their sum W, and ``lse = top + log total``:

    loss = (1 - ε) w_y (lse - x_y) + ε / V (W lse - Σ_c w_c x_c) + z lse²
    dloss / dx_c = p_c ((1 - ε) w_y + ε / V W + 2 z lse) - (1 - ε) w_y [c = y] - ε / V w_c,  p_c = exp(x_c - lse)

If y is ``ignore_index``, loss and gradient are 0. If y is any other number that is no column, they are NaN.
"""

from collections import namedtuple
from typing import NamedTuple

from ..activations import activate
from ..device import tl, triton
from ..gemm_reduce.operands import exponential

# The least float32 number. -inf would not do: -inf - -inf is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)

_LOG2E = tl.constexpr(1.4426950408889634)

# Weights of the classes and their sum, or None; how many classes there are; ε and z.
Loss = namedtuple("Loss", "weight_ptr weight_sum_ptr V smoothing z_loss")
# The factors of ``gradient_of``, one of each per row.
Factors = namedtuple("Factors", "by_share by_target by_weight by_logarithm")


class LossConstants(NamedTuple):
    """The part of a :class:`LossArithmetic` that kernels are compiled for."""

    scaled: bool
    softcapped: bool
    accuracy: str


class LossArithmetic(NamedTuple):
    """Everything but the tensors that a loss depends on; ``accuracy`` is that of exponentials and of the tanh."""

    ignore_index: int
    accuracy: str
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def numbers(self) -> tuple[int, float, float]:
        """(ignored target, ε, z) as kernels take them."""
        return self.ignore_index, float(self.label_smoothing), float(self.z_loss)

    @property
    def scales(self) -> tuple[float, float, float]:
        """(scale, softcap, 1 / softcap) as kernels take them."""
        cap = 1.0 if self.softcap is None else self.softcap
        return float(self.logit_scale), cap, 1.0 / cap

    @property
    def constants(self) -> LossConstants:
        """What kernels are compiled for."""
        return LossConstants(self.logit_scale != 1.0, self.softcap is not None, self.accuracy)


@triton.jit
def logits_of(c, scales, ARITHMETIC: tl.constexpr):
    """(scaled and capped logits, their slope in ``c``), from values of the product."""
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    scale, softcap, inverse_cap = scales
    slope = 1.0
    if ARITHMETIC.scaled:
        c *= scale
        slope = scale
    if ARITHMETIC.softcapped:
        c, tanh_slope = activate(c * inverse_cap, "tanh", ACCURACY)
        c *= softcap
        slope = tanh_slope * slope
    return c, slope


@triton.jit
def share_of(distance, ACCURACY: tl.constexpr):
    """exp(distance); with the ACCURACY "hardware" it takes one instruction and a product, and subnormals are 0."""
    if ACCURACY == "hardware":
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [distance * _LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return exponential(distance, ACCURACY)


@triton.jit
def gradient_of(
    x, slope, hit, class_weights, top, factors, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, ACCURACY: tl.constexpr
):  # fmt: skip
    """``s (by_share + by_logarithm (x - top)) - by_target [hit] - by_weight w`` through the slope of x.

    ``s = exp(x - top)`` is the share p times the total of the row.
    """
    share = share_of(x - top, ACCURACY)
    gradient = share * factors.by_share
    if ENTROPY:
        # A share of 0 contributes 0, even at an infinite distance: 0 · inf would be NaN.
        gradient += share * factors.by_logarithm * tl.where(share == 0.0, 0.0, x - top)
    if SMOOTHING:
        gradient -= factors.by_weight * class_weights
    return tl.where(hit, gradient - factors.by_target, gradient) * slope


@triton.jit
def class_weight(target, loss):
    """The weight of the target's class; NaN if the target is no column."""
    known = (target >= 0) & (target < loss.V)
    weight = tl.where(known, 1.0, float("nan"))
    if loss.weight_ptr is not None:
        weight = tl.load(loss.weight_ptr + target, mask=known, other=float("nan"))
    return weight


@triton.jit
def _weight_sum(loss):
    if loss.weight_sum_ptr is not None:
        return tl.load(loss.weight_sum_ptr)
    else:
        return loss.V * 1.0


@triton.jit
def loss_of(top, log_total, x_target, weighted, weight, loss, SMOOTHING: tl.constexpr):
    """The loss of a row from its statistics, its target's value and the weight of its class."""
    lse = top + log_total
    found = weight * (1.0 - loss.smoothing) * ((top - x_target) + log_total)
    # The square of a large logit may be infinite.
    found += tl.where(loss.z_loss > 0.0, loss.z_loss * lse * lse, 0.0)
    if SMOOTHING:
        found += loss.smoothing / loss.V * (_weight_sum(loss) * lse - weighted)
    return found


@triton.jit
def gradient_factors(upstream, counts, weight, top, log_total, loss, SMOOTHING: tl.constexpr):
    """The factors of ``gradient_of`` per share p, for a row's loss times ``upstream``."""
    # All factors of an ignored token are 0, whatever its weight; a NaN among its logits still gives NaN.
    upstream = tl.where(counts, upstream, 0.0)
    by_target = tl.where(counts, weight * (1.0 - loss.smoothing) * upstream, 0.0)
    by_weight = loss.smoothing / loss.V * upstream
    by_share = by_target + tl.where(counts, 2.0 * loss.z_loss * (top + log_total) * upstream, 0.0)
    if SMOOTHING:
        by_share += by_weight * _weight_sum(loss)
    return Factors(by_share, by_target, by_weight, 0.0)
