"""Device code of a tile of logits that comes from a product: the statistics of its rows, and who computes it.

A row of tiles is a band of rows. Its columns are shared out to ranges: that of number r has every tile of columns from
the r-th on, as many tiles apart as there are ranges.
"""

from ..device import tl, triton
from .elements import LOWEST, share_of


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
def add_tile(x, top, total, spread, ENTROPY: tl.constexpr, ACCURACY: tl.constexpr):
    """(top, total, spread) of rows after the columns of ``x``; see ``rows.py``. A NaN shows in the sums."""
    higher = tl.maximum(top, tl.max(x, 1))
    distance = x - tl.expand_dims(higher, 1)
    shares = share_of(distance, ACCURACY)
    # Finite: nothing was summed yet where it is the lowest number, and 0 · inf would be NaN.
    change = tl.maximum(top - higher, LOWEST)
    factor = share_of(change, ACCURACY)
    if ENTROPY:
        # What has no share adds nothing, however far away it is.
        spread = factor * (spread + change * total) + tl.sum(shares * tl.maximum(distance, LOWEST), 1)
    return higher, total * factor + tl.sum(shares, 1), spread
