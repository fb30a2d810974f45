"""Tables of tile configurations, one file per operation. Plain data, so that planning needs no Triton."""

from .gemm_gemm import (
    SHORTEST_SPLIT,
    WIDEST_X_IN_REGISTERS,
    PipelinedConfig,
    StoredConfig,
    TileConfig,
    padded_widths,
    pipelined_config,
    rows,
    stored_config,
    tile_config,
)
from .hidden_gradient import HiddenGradientTiles, hidden_gradient_tiles
from .limits import CONSUMER_ROWS, SHARED_MEMORY, padded_width
from .weight_gradient import PIPELINES, WeightGradientPipeline, WeightGradientTiles, weight_gradient_tiles

__all__ = [
    "CONSUMER_ROWS",
    "PIPELINES",
    "SHARED_MEMORY",
    "SHORTEST_SPLIT",
    "WIDEST_X_IN_REGISTERS",
    "HiddenGradientTiles",
    "PipelinedConfig",
    "StoredConfig",
    "TileConfig",
    "WeightGradientPipeline",
    "WeightGradientTiles",
    "hidden_gradient_tiles",
    "padded_width",
    "padded_widths",
    "pipelined_config",
    "rows",
    "stored_config",
    "tile_config",
    "weight_gradient_tiles",
]
