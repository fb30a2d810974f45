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


# On an H100 in bfloat16, in a CUDA graph, none of it in the cache: 25, 25, 52 and 24 µs for 32,768 × 512, 16,384 ×
# 1024, 65,536 × 768 and 20,480 × 656, where torch's sum takes 59, 45, 87 and 63. Of 15 others, of 16 to 128 rows and 32
# to 128 columns, none was faster beyond the noise, and 32 × 32 took 1 to 8 µs longer: too few loads are under way.
COLUMN_SUM_TILES = ColumnSumTiles(block_m=128, block_n=64, programs=264, num_warps=8, num_stages=1)

# Bands beyond which adding them up takes longer than they save: 5.8 and 8.9 µs with about 100 for 16,600 × 136 and
# 16,904 × 128, 7.9 and 11.4 with twice as many.
MOST_SUMMED_BANDS = 128
# Columns of one program, and bands at a time, that it adds up: few columns and all loads in flight, as one after the
# other would wait for memory.
BAND_BLOCKS = (32, MOST_SUMMED_BANDS)
