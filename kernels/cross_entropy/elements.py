"""Device code of single logits: their value, their share of a sum of exponentials, and the gradient of a loss.

``x = softcap · tanh(scale · logits / softcap)``, without a cap ``scale · logits``.
"""

from ..activations import activate
from ..device import tl, triton
from ..gemm_reduce.operands import exponential

# Below every finite logit of float32; not -inf, from which nothing can be subtracted.
LOWEST = tl.constexpr(-3.4028234663852886e38)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def logits_of(
    c, scale, softcap, inverse_cap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr
):  # fmt: skip
    """(the logits that the loss is made of, their slope in ``c``), from values of the product."""
    slope = 1.0
    if SCALED:
        c *= scale
        slope = scale
    if SOFTCAP:
        c, tanh_slope = activate(c * inverse_cap, "tanh", ACCURACY)
        c *= softcap
        slope = tanh_slope * slope
    return c, slope


@triton.jit
def share_of(distance, ACCURACY: tl.constexpr):
    """exp(distance), where ACCURACY is "hardware" by one instruction and a product, and 0 where it is subnormal."""
    if ACCURACY == "hardware":
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [distance * _LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return exponential(distance, ACCURACY)


@triton.jit
def gradient_of(
    x, slope, hit, class_weights, top, log_total, by_share, by_logarithm, by_target, by_weight,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    """``s (by_share + by_logarithm log p) - by_target [hit] - by_weight w`` through the slope of x.

    ``s = exp(x - top)`` is the total of the row times its share p.
    """
    share = share_of(x - top, ACCURACY)
    gradient = share * by_share
    if ENTROPY:
        # What has no share adds nothing, however far away it is: 0 · inf would be NaN.
        gradient += share * by_logarithm * tl.where(share == 0.0, 0.0, x - top - log_total)
    if SMOOTHING:
        gradient -= by_weight * class_weights
    return tl.where(hit, gradient - by_target, gradient) * slope
