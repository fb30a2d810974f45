"""Device code of a tile of logits that comes from a product: statistics of its rows, its gradient, and who computes it.

The generic and the sm90 kernels share it. A row of tiles is a band of rows. Its columns are shared out to ranges: that
of number r has every tile of columns from the r-th on, as many tiles apart as there are ranges.
"""

from collections import namedtuple

from ..device import tl, triton
from ..tiles import load_vector
from .elements import LOWEST, Factors, gradient_of, share_of

# Where statistics of rows go, of every range of their columns; and of every row the value of its target.
Partials = namedtuple("Partials", "top_ptr total_ptr spread_ptr weighted_ptr chosen_ptr")
# What the gradient of M rows and V columns is made of, the first of which is number ``start``.
Gradient = namedtuple(
    "Gradient",
    "target_ptr weight_ptr top_ptr by_share_ptr by_target_ptr by_weight_ptr by_logarithm_ptr M V start",
)


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
    """(top, total, spread) of rows after the columns of ``x``; see ``losses.py``. A NaN shows in the sums."""
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


@triton.jit
def store_statistics(partials, at, rows, top, total, spread, weighted, chosen, found):
    """Stores those of a range of columns from ``at`` on, and the value of the target where it was ``found``."""
    tl.store(partials.top_ptr + at, top)
    tl.store(partials.total_ptr + at, total)
    if partials.spread_ptr is not None:
        tl.store(partials.spread_ptr + at, spread)
    if partials.weighted_ptr is not None:
        tl.store(partials.weighted_ptr + at, weighted)
    tl.store(partials.chosen_ptr + rows, chosen, mask=found != 0)


@triton.jit
def _of_rows(ptr, rows, given):
    return tl.expand_dims(tl.load(ptr + rows, mask=rows < given.M, other=0.0), 1)


@triton.jit
def gradients_of_rows(rows, given):
    """(in which column the target of each row is, or in none; top; factors) for ``gradient_of_tile``."""
    column = tl.load(given.target_ptr + rows, mask=rows < given.M, other=-1) - given.start
    top = _of_rows(given.top_ptr, rows, given)
    by_share = _of_rows(given.by_share_ptr, rows, given)
    by_target = _of_rows(given.by_target_ptr, rows, given)
    by_weight, by_logarithm = by_target, by_target
    if given.by_weight_ptr is not None:
        by_weight = _of_rows(given.by_weight_ptr, rows, given)
    if given.by_logarithm_ptr is not None:
        by_logarithm = _of_rows(given.by_logarithm_ptr, rows, given)
    return column, top, Factors(by_share, by_target, by_weight, by_logarithm)


@triton.jit
def gradient_of_tile(x, slope, cols, of_rows, given, ACCURACY: tl.constexpr):
    """The gradient of ``logits_of`` the columns ``cols``, which behind column V may be anything."""
    SMOOTHING: tl.constexpr = given.by_weight_ptr is not None
    target, top, factors = of_rows
    class_weights = 1.0
    if SMOOTHING and given.weight_ptr is not None:
        class_weights = tl.expand_dims(load_vector(given.weight_ptr, cols, 1, given.V), 0)
    hit = tl.expand_dims(cols, 0) == tl.expand_dims(target, 1)
    ENTROPY: tl.constexpr = given.by_logarithm_ptr is not None
    return gradient_of(x, slope, hit, class_weights, top, factors, ENTROPY, SMOOTHING, ACCURACY)
