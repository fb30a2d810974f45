"""Sums over the rows of a matrix: tiles, and how the sums of bands of rows are added up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnSumTiles:
    """About ``programs`` programs, each with a band of rows of ``block_n`` columns, ``block_m`` rows at a time."""

    block_m: int
    block_n: int
    programs: int
    num_warps: int = 4
    num_stages: int = 3


# On an H200 in bfloat16: 24, 19 and 23 µs for 32,768 × 512, 16,384 × 768 and 16,384 × 1024, where torch's sum takes 53,
# 38 and 39; other blocks and twice the programs were within 3 µs, half the programs 2 to 10 µs slower.
COLUMN_SUM_TILES = ColumnSumTiles(block_m=64, block_n=64, programs=528)

# Columns of one program, and bands at a time, that it adds up: few columns and many loads in flight, as there are a few
# thousand columns and up to some hundred bands, and one program after the other would wait for memory.
BAND_BLOCKS = (32, 64)
