"""Into how many token ranges the weight gradients of a GEMM-GEMM or an FFN are split."""

from typing import Any

from ..kernels.tuning import CONSUMER_ROWS, SHORTEST_SPLIT, StoredConfig, TileConfig
from . import ffn_chunked
from .devices import PARTIALS_LIMIT, Device, splits_of_full_waves

# Beginning and ending a program takes as long as so many blocks of rows, and one block as long as storing and adding up
# so many bytes of partials. At 89 sizes on an H200 the choice took at most 1.06 times the time of the best one.
PROGRAM_BLOCKS, BYTES_OF_BLOCK = 4, 3 * 2**19
# More splits must save a twentieth: partials take memory, too.
LESS = 0.95


def choose_splits(problem: Any, device: Device, tiles: TileConfig) -> int:
    """Token ranges the weight gradient is split into: few waves of programs that fill the SMs, bounded partials."""
    if tiles.sm90 is not None:
        columns, rows, resident = tiles.sm90.consumers * CONSUMER_ROWS, tiles.sm90.block, 1
    else:
        # The accumulators take most of the registers: one program of 8 warps, or two of 4, fit on an SM.
        columns, rows, resident = tiles.block_n, tiles.block_m, 8 // tiles.num_warps
    return _fastest_splits(problem, -(-problem.N // columns) * problem.batch, device.sms * resident, rows)


def choose_stored_splits(problem: Any, device: Device, config: StoredConfig) -> int:
    """The same where what is hidden is stored."""
    tiles = config.weight_tiles(2 if problem.gated else 1, problem.K, problem.N, problem.O)
    return _fastest_splits(problem, tiles, device.sms, config.rows)


def _fastest_splits(problem: Any, tiles: int, at_once: int, rows: int) -> int:
    """One, or as many as some waves of programs hold, whichever has the fewest blocks of ``rows`` one after another.

    No split is shorter than pays, and partials stay within their limit.
    """
    limit = PARTIALS_LIMIT
    if problem.recompute is True:
        # Partials of few units and many splits could be larger than the hidden itself.
        limit = min(limit, ffn_chunked.workspace_limit(problem), 4 * problem.batch * problem.M * problem.N - 1)
    blocks, partial_bytes = -(-problem.M // rows), problem.partial_bytes
    most = min(-(-blocks // SHORTEST_SPLIT), limit // partial_bytes)
    fastest, *more = splits_of_full_waves(tiles, at_once, most)
    least = -(-tiles // at_once) * (blocks + PROGRAM_BLOCKS)
    for splits in more:
        one_after_another = -(-tiles * splits // at_once) * (-(-blocks // splits) + PROGRAM_BLOCKS)
        taken = one_after_another + splits * partial_bytes // BYTES_OF_BLOCK
        if taken < LESS * least:
            fastest, least = splits, taken
    return fastest
