"""Device functions for a tile of logits of a product, for the generic and the sm90 kernels: statistics and gradient.

A row of tiles is a band of rows. Its tiles are distributed over ranges: range r has every ``ranges``-th tile, from the
r-th on.
"""

from collections import namedtuple

from ..device import tl, triton
from ..tiles import load_vector
from .elements import LOWEST, Factors, gradient_of, share_of

# Past every column; and the sign bit, which marks the column of a NaN, so that it is less than every other one.
NOWHERE, _NAN = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))

# Where the statistics of rows are stored, for each range of columns; and the value of each row's target.
Partials = namedtuple("Partials", "top_ptr total_ptr spread_ptr weighted_ptr index_ptr chosen_ptr")
# The gradient of M rows and V columns, the first of which is number ``start``, as a function of the logits.
Gradient = namedtuple(
    "Gradient",
    "target_ptr weight_ptr top_ptr by_share_ptr by_target_ptr by_weight_ptr by_logarithm_ptr M V start",
)


@triton.jit
def ranges_of(band, bands, tile_columns, programs, group):
    """(number of ranges of a band, position of its first one among those of all bands).

    ``group`` bands are computed at the same time, by all ``programs``; the last group may have fewer.
    """
    first = band - band % group
    ranges = tl.minimum(programs // tl.minimum(group, bands - first), tile_columns)
    before = tl.minimum(programs // tl.minimum(group, bands), tile_columns)
    place = first.to(tl.int64) * before + (band - first).to(tl.int64) * ranges
    return ranges, place


@triton.jit
def first_largest(top, index, next_top, next_index):
    """The index of the larger of two values, of equal ones the lower; a negative index is that of a NaN, and wins."""
    lower = tl.minimum(index, next_index)
    found = tl.where(next_top > top, next_index, tl.where(next_top == top, lower, index))
    return tl.where(lower < 0, lower, found)


@triton.jit
def first_column(x, cols, highest):
    """The first of the columns ``cols`` that is ``highest`` or NaN, for each row; see ``first_largest``."""
    cols = tl.expand_dims(cols, 0)
    hits = tl.where(x == tl.expand_dims(highest, 1), cols, NOWHERE)
    return tl.min(tl.where(x != x, cols | _NAN, hits), 1)


@triton.jit
def add_tile(x, top, total, spread, ENTROPY: tl.constexpr, ACCURACY: tl.constexpr):
    """(top, total, spread) of rows after the columns of ``x``; see ``losses.py``. A NaN reaches the sums."""
    higher = tl.maximum(top, tl.max(x, 1))
    distance = x - tl.expand_dims(higher, 1)
    shares = share_of(distance, ACCURACY)
    # Finite even if nothing was summed yet: 0 · inf would be NaN.
    change = tl.maximum(top - higher, LOWEST)
    factor = share_of(change, ACCURACY)
    if ENTROPY:
        # A share of 0 contributes 0, even at an infinite distance.
        spread = factor * (spread + change * total) + tl.sum(shares * tl.maximum(distance, LOWEST), 1)
    return higher, total * factor + tl.sum(shares, 1), spread


@triton.jit
def store_statistics(partials, at, rows, top, total, spread, weighted, index, chosen, found):
    """Store the statistics of a range of columns at ``at``, and the value of the target where it was ``found``."""
    tl.store(partials.top_ptr + at, top)
    tl.store(partials.total_ptr + at, total)
    if partials.spread_ptr is not None:
        tl.store(partials.spread_ptr + at, spread)
    if partials.weighted_ptr is not None:
        tl.store(partials.weighted_ptr + at, weighted)
    if partials.index_ptr is not None:
        tl.store(partials.index_ptr + at, index)
    tl.store(partials.chosen_ptr + rows, chosen, mask=found != 0)


@triton.jit
def _of_rows(ptr, rows, given):
    return tl.expand_dims(tl.load(ptr + rows, mask=rows < given.M, other=0.0), 1)


@triton.jit
def gradients_of_rows(rows, given):
    """(column of each row's target, top, factors) for ``gradient_of_tile``."""
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
    """The gradient at the columns ``cols``, from ``logits_of``; undefined from column V on."""
    SMOOTHING: tl.constexpr = given.by_weight_ptr is not None
    target, top, factors = of_rows
    class_weights = 1.0
    if SMOOTHING and given.weight_ptr is not None:
        class_weights = tl.expand_dims(load_vector(given.weight_ptr, cols, 1, given.V), 0)
    hit = tl.expand_dims(cols, 0) == tl.expand_dims(target, 1)
    ENTROPY: tl.constexpr = given.by_logarithm_ptr is not None
    return gradient_of(x, slope, hit, class_weights, top, factors, ENTROPY, SMOOTHING, ACCURACY)
