"""Cross-entropy of rows of logits: the columns that a program reads at a time."""

from dataclasses import dataclass

from .limits import padded_width

# Columns of one step. More would keep more loads in flight, and need more registers for the maximum and the sums that
# every lane has of its own: on an H200 2,048 columns took 0.7 to 0.97 of the time of 4,096 to 16,384.
WIDEST_ROW_BLOCK = 2048
_NARROWEST = 128
# Of each thread in a step: one load of 16 bytes in 16 bits.
_ELEMENTS = 8


@dataclass(frozen=True)
class RowTiles:
    """A program takes one row, ``block`` columns of it at a time."""

    block: int
    num_warps: int


def row_tiles(columns: int) -> RowTiles:
    """The tiles for rows of so many columns, in every dtype: sums are float32 in all of them."""
    block = min(WIDEST_ROW_BLOCK, max(_NARROWEST, padded_width(columns)))
    return RowTiles(block, max(1, block // (32 * _ELEMENTS)))
