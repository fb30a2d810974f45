"""Experts: the warp-specialised kernels' configurations. Plain data."""

from .gemm_epilogue import EpiloguePipeline as GroupedPipeline

# What the rows of every expert are padded to a multiple of: those of one tile.
BLOCK = 128

# By (step, gated); a gated product is a sum of two. The weight gradient is the same kernel with and without a gate. On
# an H200 a sixth stage in the place of two places for results gained 1 to 4 %; groups of 4 to 16 made no difference.
# Groups are those of one expert: its weights are read once for so many tiles of its rows.
GROUPED_PIPELINES: dict[tuple[str, bool], GroupedPipeline] = {
    ("hidden", False): GroupedPipeline(stages=6, places=1, group=16),
    ("hidden", True): GroupedPipeline(stages=6, places=1, group=16),
    ("product", False): GroupedPipeline(stages=6, places=1, group=16),
    ("product", True): GroupedPipeline(stages=6, places=1, group=16),
    ("hidden_gradient", False): GroupedPipeline(stages=5, z_stages=2, group=16),
    ("hidden_gradient", True): GroupedPipeline(stages=4, z_stages=4, group=16),
    ("weight_gradient", False): GroupedPipeline(stages=6, places=1, group=16),
    ("weight_gradient", True): GroupedPipeline(stages=6, places=1, group=16),
}

__all__ = ["BLOCK", "GROUPED_PIPELINES", "GroupedPipeline"]
