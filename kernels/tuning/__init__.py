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
from .gemm_reduce import (
    PipelinedReduceConfig,
    ReduceConfig,
    pipelined_reduce_config,
    reduce_config,
    reduce_gradient_config,
)
from .limits import CONSUMER_ROWS, SHARED_MEMORY, padded_width
from .maxsim import GatherConfig, OneHotConfig, gather_config, one_hot_config

__all__ = [
    "CONSUMER_ROWS",
    "SHARED_MEMORY",
    "SHORTEST_SPLIT",
    "WIDEST_X_IN_REGISTERS",
    "GatherConfig",
    "OneHotConfig",
    "PipelinedConfig",
    "PipelinedReduceConfig",
    "ReduceConfig",
    "StoredConfig",
    "TileConfig",
    "gather_config",
    "one_hot_config",
    "padded_width",
    "padded_widths",
    "pipelined_config",
    "pipelined_reduce_config",
    "reduce_config",
    "reduce_gradient_config",
    "rows",
    "stored_config",
    "tile_config",
]
