"""Device code of one row of logits: its values, its logsumexp in one pass, and the pass that writes its gradient.

A row's statistics are its largest value ``top`` and ``total = Σ_c exp(x_c - top)``: two numbers, because the loss of a
token that is almost certain is lost in their sum ``top + log total``.
"""

from ..device import tl, triton
from ..gemm_reduce.operands import exponential
from .elements import LOWEST, gradient_of, logits_of


@triton.jit
def values_and_slope(
    row_ptr, cols, V, length, scale, softcap, inverse_cap, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr
):  # fmt: skip
    """x at ``cols``, -inf from column V on, and its slope in the logits.

    Of a row all ``length`` elements are read: V divides into no whole vectors, and one by one they would take longer.
    """
    value = tl.load(row_ptr + cols, mask=cols < length, other=0.0).to(tl.float32)
    value, slope = logits_of(value, scale, softcap, inverse_cap, True, SOFTCAP, ACCURACY)
    return tl.where(cols < V, value, -float("inf")), slope


@triton.jit
def row_statistics(
    row_ptr, weight_ptr, V, length, scale, softcap, inverse_cap, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    """(top, total, Σ_c w_c x_c) of a row; the last is 0 where nobody asks.

    Each lane has a maximum and sums of its own, so that nothing crosses the lanes before the end. Of a new value and
    the lane's maximum one exponential is enough: the other one is 1.
    """
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x, _ = values_and_slope(row_ptr, cols, V, length, scale, softcap, inverse_cap, SOFTCAP, ACCURACY)
        distance = x - top
        share = exponential(-tl.abs(distance), ACCURACY)
        rises = distance > 0
        total = tl.where(rises, total * share + 1.0, total + share)
        top = tl.where(rises, x, top)
        if SMOOTHING:
            inside = cols < V
            x = tl.where(inside, x, 0.0)
            if weight_ptr is not None:
                x *= tl.load(weight_ptr + cols, mask=inside, other=0.0)
            weighted += x
    row_top = tl.max(top, 0)
    row_total = tl.sum(total * exponential(top - row_top, ACCURACY), 0)
    return row_top, row_total, tl.sum(weighted, 0)


@triton.jit
def replace_by_gradient(
    row_ptr, weight_ptr, target, top, total, by_share, by_target, by_weight, V, length, scale, softcap, inverse_cap,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the row, see ``gradient_of``, whose factors are those of p here.

    All ``length`` elements of the row are written, zeros from column V on.
    """
    inverse = 1.0 / total
    for first in tl.range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x, slope = values_and_slope(row_ptr, cols, V, length, scale, softcap, inverse_cap, SOFTCAP, ACCURACY)
        if SMOOTHING and weight_ptr is not None:
            class_weights = tl.load(weight_ptr + cols, mask=cols < V, other=0.0)
        else:
            class_weights = 1.0
        g = gradient_of(
            x, slope, cols == target, class_weights, top, 0.0, by_share * inverse, 0.0, by_target, by_weight,
            False, SMOOTHING, ACCURACY,
        )  # fmt: skip
        g = tl.where(cols < V, g, 0.0)
        tl.store(row_ptr + cols, g.to(row_ptr.dtype.element_ty), mask=cols < length)
