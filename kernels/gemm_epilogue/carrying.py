"""A sum that is added to again and again, carried in 16 + 4 bits: rounded to its dtype, and four bits more.

The sum itself lies in the tensor that it becomes, so that only the bits beyond it need memory: half a byte for each
element, two columns in a byte. A number of bfloat16 is the upper half of its float32; the four bits are those of the
difference that come next, rounded. So an addition rounds to a 16th of what a rounding to bfloat16 costs, and the last
one, which needs no more bits, rounds as any other result is rounded. float16 has its own next bits; beyond its normal
numbers, where it has fewer bits or none, the sum is rounded to it each time: one that leaves its range on the way stays
infinite, also where later groups would have brought it back.
"""

from ..device import tl, triton


@triton.constexpr_function
def _last_bit(dtype: tl.dtype) -> int:
    """The place of the last of the four bits among those of float32."""
    return 12 if dtype == tl.bfloat16 else 9


@triton.constexpr_function
def _smallest(dtype: tl.dtype) -> float:
    """From which number on the dtype's bits are float32's first ones."""
    return 0.0 if dtype == tl.bfloat16 else 2.0**-14


@triton.jit
def carried(total, DTYPE: tl.constexpr):
    """The sum rounded to its dtype, and four more bits as integers from -8 to 7."""
    LAST: tl.constexpr = _last_bit(DTYPE)
    SMALLEST: tl.constexpr = _smallest(DTYPE)
    rounded = total.to(DTYPE)
    # Both have the same sign, so that the integers are as far apart as the numbers, whatever the exponent.
    rest = total.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    rest = ((rest >> (LAST - 1)) + 1) >> 1
    # Half a step to the next number is -8 seen from there. What is no number is not at least anything.
    half = (rest == 8) & (tl.abs(total) >= SMALLEST)
    rounded = (rounded.to(tl.int16, bitcast=True) + half.to(tl.int16)).to(DTYPE, bitcast=True)
    rest = tl.where(half, -8, rest)
    return rounded, tl.where((rest < -8) | (rest > 7), 0, rest)


@triton.jit
def restored(rounded, rest):
    """The sum in float32, of its two parts. What is infinite or no number has no bits beyond that change it."""
    LAST: tl.constexpr = _last_bit(rounded.dtype)
    bits = rounded.to(tl.float32).to(tl.int32, bitcast=True) + (rest << LAST)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def paired(even, odd):
    """Two columns' bits in one byte."""
    return ((even & 15) | (odd << 4)).to(tl.int8)


@triton.jit
def unpaired(both):
    """The bits of two columns."""
    both = both.to(tl.int32)
    return (both << 28) >> 28, both >> 4
