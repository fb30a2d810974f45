"""Weight and bias gradient in one pass over dy: the warp-specialised kernel's tiles.

They are all that fill the registers of two consumers, or half of them; which one a problem takes is a matter of its
sizes, and decided by ``planning``. The generic kernel takes the tiles of other products.
"""

from dataclasses import dataclass

from .limits import CONSUMER_ROWS, stages_that_fit


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


PIPELINES = (
    WeightGradientPipeline(CONSUMER_ROWS, 256, 2),
    WeightGradientPipeline(2 * CONSUMER_ROWS, 128, 4),
    WeightGradientPipeline(CONSUMER_ROWS, 128, 4),
)
