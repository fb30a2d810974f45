"""Weight and bias gradient in one pass over dy: architecture and dtype -> tiles.

Rows of ``other`` are conservative ones. The sm90 tiles are all that fill the registers of two consumers, or half
of them; which one a problem takes is a matter of its sizes, and decided by ``planning``.
"""

from dataclasses import dataclass

from .limits import CONSUMER_ROWS, stages_that_fit


@dataclass(frozen=True)
class WeightGradientTiles:
    """The generic kernel: ``block_o × block_k`` of dW for each program, from ``block_m`` rows at a time."""

    block_o: int
    block_k: int
    block_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class WeightGradientPipeline:
    """The warp-specialised kernel: two consumers with ``units × columns`` of dW each, below one another.

    ``stages`` of ``rows`` rows of both sides are on their way or on chip at once: as many as fit, up to six, as a
    seventh was not measured. ``group`` tiles below one another are computed before those to their right, so that
    programs that run at once read few columns of both sides. At most ``programs`` programs run, each of which takes
    tile after tile. ``sum_warps`` add up dy for its bias gradient: two where a matrix instruction needs more registers
    than sixteen warps can have, else four.
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
        """Those of the ring; results leave from registers."""
        return stages_that_fit(sum(self.tile), self.rows, 0, most=6)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of dW that one program computes."""
        return self.consumers * self.units, self.columns


# By (architecture, bits of an element); architectures without a row take that of "other".
TABLE: dict[tuple[str, int], WeightGradientTiles] = {
    ("sm_90", 16): WeightGradientTiles(128, 128, 64, 8, 3),
    ("other", 16): WeightGradientTiles(64, 64, 32, 4, 2),
    ("other", 32): WeightGradientTiles(32, 32, 32, 4, 1),
}

PIPELINES = (
    WeightGradientPipeline(CONSUMER_ROWS, 256, 2),
    WeightGradientPipeline(2 * CONSUMER_ROWS, 128, 4),
    WeightGradientPipeline(CONSUMER_ROWS, 128, 4),
)


def weight_gradient_tiles(architecture: str, bits: int) -> WeightGradientTiles:
    """The generic kernel's tiles for operands of ``bits`` bits."""
    return TABLE.get((architecture, bits)) or TABLE[("other", bits)]
