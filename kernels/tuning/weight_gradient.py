"""Weight and bias gradient in one pass over dy: the tiles of the sm90 kernel.

They fill the registers of two consumers, or half of these; ``planning`` chooses one by the sizes. The generic kernel
has the tiles of other products.
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
