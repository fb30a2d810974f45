"""Experts: the configurations of the sm90 kernels."""

from dataclasses import dataclass
from typing import ClassVar

from .gemm_epilogue import EpiloguePipeline
from .limits import CONSUMER_ROWS, stages_that_fit

# The rows of every expert are padded to a multiple of a tile's.
BLOCK = 128
# Columns of a tile of two cooperative consumers.
COOPERATIVE_COLUMNS = 256


@dataclass(frozen=True)
class CooperativePipeline:
    """A product without an activation: two cooperative consumers compute tiles of 128 × 256, 64 rows each.

    The other fields are those of :class:`EpiloguePipeline`.
    """

    tile: ClassVar[tuple[int, int]] = (2 * CONSUMER_ROWS, COOPERATIVE_COLUMNS)

    slots: int = 2
    step: int = 64
    group: int = 16
    programs: int = 132
    bits: int = 16

    @property
    def stages(self) -> int:
        """Stages of the ring that fit beside the staging buffers."""
        return stages_that_fit(sum(self.tile), self.step, 2 * self.slots, bits=self.bits)


GroupedPipeline = EpiloguePipeline | CooperativePipeline

# By (step, gated); a gated product is a sum of two. The weight gradient has one kernel, with and without a gate. Groups
# have tile rows of one expert, whose weights are read once per group. On an H200 a sixth stage instead of two staging
# buffers gained 1 to 4 %; groups of 4 to 16 made no difference. On an H100 the cooperative mainloop took 0.44 to 1.1
# times as long as ping-pong with tiles of 128 × 128 for 24 products and weight gradients of six sizes (0.44 to 0.87 at
# 8 experts with 2,048 rows each, 4096 × 14,336).
GROUPED_PIPELINES: dict[tuple[str, bool], GroupedPipeline] = {
    ("hidden", False): EpiloguePipeline(slots=1, group=16),
    ("hidden", True): EpiloguePipeline(slots=1, group=16),
    ("product", False): CooperativePipeline(),
    ("product", True): CooperativePipeline(),
    ("hidden_gradient", False): EpiloguePipeline(z_stages=2, group=16),
    ("hidden_gradient", True): EpiloguePipeline(z_stages=4, group=16),
    ("weight_gradient", False): CooperativePipeline(),
    ("weight_gradient", True): CooperativePipeline(),
}

# Weight gradients of 8-bit operands.
SCALED_WEIGHT_GRADIENT = CooperativePipeline(step=128, bits=8)

__all__ = [
    "BLOCK",
    "COOPERATIVE_COLUMNS",
    "GROUPED_PIPELINES",
    "SCALED_WEIGHT_GRADIENT",
    "CooperativePipeline",
    "GroupedPipeline",
]
