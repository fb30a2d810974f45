"""Into how many token ranges the weight gradients of a GEMM-GEMM or an FFN are split."""

from typing import Any

from ..kernels.tuning import CONSUMER_ROWS, SHORTEST_SPLIT, StoredConfig, TileConfig
from . import ffn_chunked
from .devices import PARTIALS_LIMIT, Device


def choose_splits(problem: Any, device: Device, tiles: TileConfig) -> int:
    """Token ranges the weight gradient is split into: enough programs for every SM, bounded partials."""
    if tiles.pipelined is not None:
        columns, row_tile, resident = tiles.pipelined.consumers * CONSUMER_ROWS, tiles.pipelined.block, 1
    else:
        # The accumulators take most of the registers: one program of 8 warps, or two of 4, fit on an SM.
        columns, row_tile, resident = tiles.block_n, tiles.block_m, 8 // tiles.num_warps
    programs = -(-problem.N // columns) * problem.batch
    return _bounded_splits(problem, device.sms * resident // programs, row_tile)


def choose_stored_splits(problem: Any, device: Device, config: StoredConfig) -> int:
    """The same where what is hidden is stored: the programs of all splits run at once."""
    tiles = config.weight_tiles(2 if problem.gated else 1, problem.K, problem.N, problem.O)
    return _bounded_splits(problem, device.sms // tiles, config.rows)


def _bounded_splits(problem: Any, wanted: int, row_tile: int) -> int:
    """At least one, none shorter than pays, and partials within their limit."""
    most = -(-problem.M // (row_tile * SHORTEST_SPLIT))
    limit = PARTIALS_LIMIT
    if problem.recompute is True:
        # Partials of few units and many splits could be larger than the hidden itself.
        limit = min(limit, ffn_chunked.workspace_limit(problem), 4 * problem.batch * problem.M * problem.N - 1)
    return max(1, min(wanted, most, limit // problem.partial_bytes))
