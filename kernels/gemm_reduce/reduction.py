"""What becomes of a tile of the product in registers, whichever kernel has computed it.

The state of a row is a value, which is a sum or the largest so far; of a logsumexp the sum of exponentials relative to
that; and the index where the value was found.
"""

from collections import namedtuple

from ..device import tl, triton
from .operands import exponential, let_in

_NOWHERE = tl.constexpr(2**31 - 1)  # behind every column
_LOG2E = tl.constexpr(1.4426950408889634)
# Of some rows, in registers: all numbers but the indices are float32.
State = namedtuple("State", "value exponentials index")
# Where states go: values, indices and sums of exponentials, or None; and what mean divides by, for each batch entry.
Results = namedtuple("Results", "values_ptr index_ptr sums_ptr counts_ptr")


@triton.constexpr_function
def summed(op: str) -> bool:
    """Whether the value is a sum; else the kernels maximise: for a minimum, what is negated."""
    return op in ("sum", "mean", "sumsq")


@triton.constexpr_function
def nothing(op: str) -> float:
    """The value of no columns, which those that do not take part count as."""
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
    """The state after the columns of ``c``: those before ``end``, where a tile is ``ragged``, which the mask lets in.

    ``ACCURACY`` is that of ``exponential``, or "hardware": what takes one instruction.
    """
    value, exponentials, index = state
    if OP == "min":
        c = -c
    elif OP == "absmax":
        c = tl.abs(c)
    elif OP == "sumsq":
        c = c * c
    NOTHING: tl.constexpr = nothing(OP)
    if mask_ptr is not None:
        taking = let_in(mask_ptr, mask_strides, batch, cols, cols < end)
        c = tl.where(tl.expand_dims(taking, 0), c, NOTHING)
    elif ragged:
        c = tl.where(tl.expand_dims(cols < end, 0), c, NOTHING)
    if summed(OP):
        value += tl.sum(c, 1)
    else:
        highest = tl.reduce(c, 1, larger)
        if OP == "logsumexp":
            best = larger(value, highest)
            shift = finite(best)
            if ACCURACY == "hardware":
                terms = _fast_exp2(c * _LOG2E - tl.expand_dims(shift * _LOG2E, 1))
                # Nothing was summed yet where the largest is -inf: a factor of inf would make it NaN.
                factor = tl.where(value == float("-inf"), 0.0, _fast_exp2((finite(value) - shift) * _LOG2E))
            else:
                terms = exponential(c - tl.expand_dims(shift, 1), ACCURACY)
                factor = exponential(value - shift, ACCURACY)
            exponentials = exponentials * factor + tl.sum(terms, 1)
            value = best
        else:
            if INDEXED:
                # NaN wins: a row that contains NaN has the index of its first NaN, any other that of its maximum.
                hit = (c == tl.expand_dims(highest, 1)) | (c != c)
                # Infinitely small, a column past the end is found where all others are so too: never before them.
                found = tl.reduce(tl.where(hit, tl.expand_dims(cols, 0), _NOWHERE), 1, _earlier)
                index = tl.where(wins(highest, value), found, index)
            value = larger(value, highest)
    return State(value, exponentials, index)


@triton.jit
def finished(value, exponentials, divisor, OP: tl.constexpr):
    """D of a complete state; mean divides by ``divisor``."""
    if OP == "mean":
        value = tl.div_rn(value, divisor)
    elif OP == "min":
        value = -value
    elif OP == "logsumexp":
        value = finite(value) + tl.log(exponentials)
    return value


@triton.jit
def store_state(state, results, at, inside, batch, OP: tl.constexpr, END: tl.constexpr):
    """Stores D, or of one split its state; ``END`` is that of ``matmul.generic.epilogues.finish``."""
    value, exponentials, index = state
    if END != "partial":
        divisor = 1.0
        if OP == "mean":
            divisor = tl.load(results.counts_ptr + batch)
        value = finished(value, exponentials, divisor, OP)
    elif OP == "logsumexp":
        tl.store(results.sums_ptr + at, exponentials, mask=inside)
    if END == "atomic":
        tl.atomic_add(results.values_ptr + at, value, mask=inside)
    else:
        tl.store(results.values_ptr + at, value.to(results.values_ptr.dtype.element_ty), mask=inside)
    if results.index_ptr is not None:
        tl.store(results.index_ptr + at, index, mask=inside)
