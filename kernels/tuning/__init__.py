"""Tables of tile configurations, one file per operation. Plain data, so that planning needs no Triton.

Every sm_90 configuration passed the exact-integer test on an H200 with Triton 3.6.0, under ptxas 12.8 and 13.0; those
of other architectures were compiled only. ``python -m fusedlayers.bench selftest`` repeats the test on any GPU.
"""

from .gemm_epilogue import (
    EPILOGUE_ELEMENTS,
    EPILOGUE_PIPELINES,
    FEW_WEIGHTS,
    FEW_WEIGHTS_GROUP,
    EpiloguePipeline,
    EpilogueTiles,
    epilogue_tiles,
    gradients_joined,
    hidden_stride,
)
from .gemm_gemm import (
    SHORTEST_SPLIT,
    WIDEST_X_IN_REGISTERS,
    Sm90Config,
    StoredConfig,
    TileConfig,
    padded_widths,
    rows,
    sm90_config,
    stored_config,
    tile_config,
)
from .gemm_reduce import (
    OneHotPipeline,
    ReduceConfig,
    Sm90ReduceConfig,
    one_hot_pipeline,
    one_pass_config,
    reduce_config,
    reduce_gradient_config,
    sm90_reduce_config,
)
from .limits import CONSUMER_ROWS, SHARED_MEMORY, has_tanh, padded_width, sm90_width, starts_early
from .maxsim import GatherConfig, OneHotConfig, gather_config, one_hot_config
from .split_k import SplitTiles, reduce_blocks, split_tiles
from .weight_gradient import (
    BAND_BLOCKS,
    COLUMN_SUM_TILES,
    MOST_SUMMED_BANDS,
    PIPELINES,
    ColumnSumTiles,
    WeightGradientPipeline,
)

__all__ = [
    "BAND_BLOCKS",
    "COLUMN_SUM_TILES",
    "CONSUMER_ROWS",
    "EPILOGUE_ELEMENTS",
    "EPILOGUE_PIPELINES",
    "FEW_WEIGHTS",
    "FEW_WEIGHTS_GROUP",
    "MOST_SUMMED_BANDS",
    "PIPELINES",
    "SHARED_MEMORY",
    "SHORTEST_SPLIT",
    "WIDEST_X_IN_REGISTERS",
    "ColumnSumTiles",
    "EpiloguePipeline",
    "EpilogueTiles",
    "GatherConfig",
    "OneHotConfig",
    "OneHotPipeline",
    "ReduceConfig",
    "Sm90Config",
    "Sm90ReduceConfig",
    "SplitTiles",
    "StoredConfig",
    "TileConfig",
    "WeightGradientPipeline",
    "epilogue_tiles",
    "gather_config",
    "gradients_joined",
    "has_tanh",
    "hidden_stride",
    "one_hot_config",
    "one_hot_pipeline",
    "one_pass_config",
    "padded_width",
    "padded_widths",
    "reduce_blocks",
    "reduce_config",
    "reduce_gradient_config",
    "rows",
    "sm90_config",
    "sm90_reduce_config",
    "sm90_width",
    "split_tiles",
    "starts_early",
    "stored_config",
    "tile_config",
]
