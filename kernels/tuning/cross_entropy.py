"""Cross-entropy of rows of logits: the columns that a program reads at a time."""

from dataclasses import dataclass

from .limits import padded_width

# Columns of one step: wider ones keep more loads in flight, and need more registers for what a column sums up.
WIDEST_ROW_BLOCK = 4096
_NARROWEST = 128


@dataclass(frozen=True)
class RowTiles:
    """A program takes one row, ``block`` columns of it at a time."""

    block: int
    num_warps: int


def row_tiles(columns: int) -> RowTiles:
    """The tiles for rows of so many columns, in every dtype: sums are float32 in all of them."""
    block = min(WIDEST_ROW_BLOCK, max(_NARROWEST, padded_width(columns)))
    # Four elements of 32 bits, or more, for every thread and each of its sums.
    return RowTiles(block, max(1, min(16, block // 256)))
