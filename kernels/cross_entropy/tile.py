"""Device code of a tile of logits that comes from a product: its values, the statistics of its rows, who computes it.

A row of tiles is a band of rows. Its columns are shared out to ranges: that of number r has every tile of columns from
the r-th on, as many tiles apart as there are ranges.
"""

from ..activations import activate
from ..device import tl, triton
from ..gemm_reduce.operands import exponential
from .rows import LOWEST

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ranges_of(band, bands, tile_columns, programs, group):
    """(how many ranges the columns of a band are shared out to, the place of its first one among those of all bands).

    ``group`` bands are computed at the same time, by all ``programs``; the last group may have fewer.
    """
    first = band - band % group
    ranges = tl.minimum(programs // tl.minimum(group, bands - first), tile_columns)
    before = tl.minimum(programs // tl.minimum(group, bands), tile_columns)
    place = first.to(tl.int64) * before + (band - first).to(tl.int64) * ranges
    return ranges, place


@triton.jit
def logits_of(
    c, scale, softcap, inverse_cap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, ACCURACY: tl.constexpr
):  # fmt: skip
    """The logits that the loss is made of, from a tile of the product."""
    if SCALED:
        c *= scale
    if SOFTCAP:
        c, _ = activate(c * inverse_cap, "tanh", ACCURACY)
        c *= softcap
    return c


@triton.jit
def _share(distance, ACCURACY: tl.constexpr):
    """exp(distance), where ACCURACY is "hardware" by one instruction and a product, and 0 where it is subnormal."""
    if ACCURACY == "hardware":
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [distance * _LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return exponential(distance, ACCURACY)


@triton.jit
def add_tile(x, top, total, spread, ENTROPY: tl.constexpr, ACCURACY: tl.constexpr):
    """(top, total, spread) of rows after the columns of ``x``; see ``rows.py``. A NaN shows in the sums."""
    higher = tl.maximum(top, tl.max(x, 1))
    distance = x - tl.expand_dims(higher, 1)
    shares = _share(distance, ACCURACY)
    # Finite: nothing was summed yet where it is the lowest number, and 0 · inf would be NaN.
    change = tl.maximum(top - higher, LOWEST)
    factor = _share(change, ACCURACY)
    if ENTROPY:
        # What has no share adds nothing, however far away it is.
        spread = factor * (spread + change * total) + tl.sum(shares * tl.maximum(distance, LOWEST), 1)
    return higher, total * factor + tl.sum(shares, 1), spread
