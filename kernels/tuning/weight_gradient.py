"""Weight and bias gradient in one pass over dy: the tiles of the sm90 kernel; and column sums, a bias gradient alone.

Its tiles fill the registers of two consumers, or half of these; ``planning`` chooses one by the sizes. The generic
kernel has the tiles of other products.
"""

from dataclasses import dataclass

from .limits import CONSUMER_ROWS, stages_that_fit


@dataclass(frozen=True)
class WeightGradientPipeline:
    """The sm90 kernel: two cooperative consumers with ``units × columns`` of dW each.

    The ring has ``stages`` of ``rows`` rows of both operands: as many as fit, up to six, as a seventh was not measured.
    Tiles are swizzled in groups of ``group`` tile rows. Persistent, with at most ``programs`` programs. ``sum_warps``
    sum dy for its bias gradient: two if a wgmma needs more registers than sixteen warps can have, else four.
    """

    units: int
    columns: int
    sum_warps: int
    programs: int = 132
    consumers: int = 2
    rows: int = 64
    group: int = 16

    @property
    def stages(self) -> int:
        """Stages of the ring; results are stored from registers."""
        return stages_that_fit(sum(self.tile), self.rows, 0, most=6)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of dW that one program computes."""
        return self.consumers * self.units, self.columns


PIPELINES = (
    WeightGradientPipeline(CONSUMER_ROWS, 256, 2),
    WeightGradientPipeline(2 * CONSUMER_ROWS, 128, 4),
    WeightGradientPipeline(CONSUMER_ROWS, 128, 4),
)


@dataclass(frozen=True)
class ColumnSumTiles:
    """About ``programs`` programs, each with a band of rows of ``block_n`` columns, ``block_m`` rows at a time."""

    block_m: int
    block_n: int
    programs: int
    num_warps: int = 4
    num_stages: int = 3


# On an H100 in bfloat16, in a CUDA graph with a cold L2 cache: 25, 25, 52 and 24 µs for 32,768 × 512, 16,384 × 1024,
# 65,536 × 768 and 20,480 × 656, where torch's sum takes 59, 45, 87 and 63. None of 15 others, of 16 to 128 rows and 32
# to 128 columns, was faster beyond the noise; 32 × 32 took 1 to 8 µs longer: too few loads in flight.
COLUMN_SUM_TILES = ColumnSumTiles(block_m=128, block_n=64, programs=264, num_warps=8, num_stages=1)

# With more bands their reduction costs more than they save: 16,600 × 136 and 16,904 × 128 took 5.8 and 8.9 µs with
# about 100 bands, 7.9 and 11.4 with twice as many.
MOST_SUMMED_BANDS = 128
# How bands are reduced: columns per program, and bands at a time. All loads are in flight together, which hides the
# memory latency.
BAND_BLOCKS = (32, MOST_SUMMED_BANDS)
