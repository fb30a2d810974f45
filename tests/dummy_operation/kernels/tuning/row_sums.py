"""Tiles of the sums of rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowSumTiles:
    """A program adds up ``block_m`` rows, ``block_n`` columns at a time."""

    block_m: int = 16
    block_n: int = 32
