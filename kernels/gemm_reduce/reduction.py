"""The epilogue of the generic and the sm90 kernel: the reduction of a tile of the product in registers.

The state of a row is a value, which is a sum or the largest so far; for logsumexp the sum of exponentials relative to
that; and the index of the value.
"""

from collections import namedtuple

from ..device import tl, triton
from .operands import exponential, unmasked

_NOWHERE = tl.constexpr(2**31 - 1)  # past every column
_LOG2E = tl.constexpr(1.4426950408889634)
# The state of some rows, in registers: float32, but for the indices.
State = namedtuple("State", "value exponentials index")
# Where states are stored: values, indices and sums of exponentials, or None; and the divisors of mean, one per entry.
Results = namedtuple("Results", "values_ptr index_ptr sums_ptr counts_ptr")


@triton.constexpr_function
def summed(op: str) -> bool:
    """Whether the value is a sum; otherwise it is a maximum, for min that of the negated product."""
    return op in ("sum", "mean", "sumsq")


@triton.constexpr_function
def identity(op: str) -> float:
    """The identity of the reduction, which stands for columns that are not reduced."""
    return 0.0 if op in ("sum", "mean", "sumsq") else float("-inf")


@triton.jit
def larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _earlier(left, right):
    return tl.minimum(left, right)


@triton.jit
def wins(value, best):
    """Whether a later value replaces the best one so far: it is larger, or the first NaN."""
    return (value > best) | ((value != value) & (best == best))


@triton.jit
def finite(largest):
    """The number to subtract before exponentials: an infinite maximum would leave only NaN."""
    return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)


@triton.jit
def _fast_exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reduce_tile(
    c, state, cols, batch, end, ragged, mask_ptr, mask_strides, OP: tl.constexpr, INDEXED: tl.constexpr,
    ACCURACY: tl.constexpr,
):  # fmt: skip
    """The state after the columns of ``c``; a ``ragged`` tile may extend past ``end``, and the mask excludes columns.

    ``ACCURACY`` is that of ``exponential``, or "hardware": one instruction.
    """
    value, exponentials, index = state
    if OP == "min":
        c = -c
    elif OP == "absmax":
        c = tl.abs(c)
    elif OP == "sumsq":
        c = c * c
    IDENTITY: tl.constexpr = identity(OP)
    if mask_ptr is not None:
        included = unmasked(mask_ptr, mask_strides, batch, cols, cols < end)
        c = tl.where(tl.expand_dims(included, 0), c, IDENTITY)
    elif ragged:
        c = tl.where(tl.expand_dims(cols < end, 0), c, IDENTITY)
    if summed(OP):
        value += tl.sum(c, 1)
    else:
        highest = tl.reduce(c, 1, larger)
        if OP == "logsumexp":
            best = larger(value, highest)
            shift = finite(best)
            if ACCURACY == "hardware":
                terms = _fast_exp2(c * _LOG2E - tl.expand_dims(shift * _LOG2E, 1))
                # Where the maximum is -inf nothing was summed yet: a factor of inf would give NaN.
                factor = tl.where(value == float("-inf"), 0.0, _fast_exp2((finite(value) - shift) * _LOG2E))
            else:
                terms = exponential(c - tl.expand_dims(shift, 1), ACCURACY)
                factor = exponential(value - shift, ACCURACY)
            exponentials = exponentials * factor + tl.sum(terms, 1)
            value = best
        else:
            if INDEXED:
                # NaN wins: a row that contains NaN has the index of its first NaN.
                hit = (c == tl.expand_dims(highest, 1)) | (c != c)
                # A column past the end is -inf: it is found only if all others are, and never before them.
                found = tl.reduce(tl.where(hit, tl.expand_dims(cols, 0), _NOWHERE), 1, _earlier)
                index = tl.where(wins(highest, value), found, index)
            value = larger(value, highest)
    return State(value, exponentials, index)


@triton.jit
def result_of(value, exponentials, divisor, OP: tl.constexpr):
    """D from a complete state; mean divides by ``divisor``."""
    if OP == "mean":
        value = tl.div_rn(value, divisor)
    elif OP == "min":
        value = -value
    elif OP == "logsumexp":
        value = finite(value) + tl.log(exponentials)
    return value


@triton.jit
def store_state(state, results, at, inside, batch, OP: tl.constexpr, OUTPUT: tl.constexpr):
    """Store D, or the state of one split; ``OUTPUT`` is that of ``matmul.generic.epilogues.store_product``."""
    value, exponentials, index = state
    if OUTPUT != "partial":
        divisor = 1.0
        if OP == "mean":
            divisor = tl.load(results.counts_ptr + batch)
        value = result_of(value, exponentials, divisor, OP)
    elif OP == "logsumexp":
        tl.store(results.sums_ptr + at, exponentials, mask=inside)
    if OUTPUT == "atomic":
        tl.atomic_add(results.values_ptr + at, value, mask=inside)
    else:
        tl.store(results.values_ptr + at, value.to(results.values_ptr.dtype.element_ty), mask=inside)
    if results.index_ptr is not None:
        tl.store(results.index_ptr + at, index, mask=inside)
