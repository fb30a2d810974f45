"""The tiles of the fused kernels of a GEMM-GEMM or an FFN, and the token ranges of their weight gradients."""

from dataclasses import dataclass, replace
from typing import Any

from ..kernels.tuning import (
    CONSUMER_ROWS,
    SHORTEST_SPLIT,
    Sm90Config,
    StoredConfig,
    TileConfig,
    sm90_config,
    stored_config,
    tile_config,
)
from ..kernels.tuning.dtypes import GENERIC
from . import ffn_chunked
from .devices import PARTIALS_LIMIT, Device, splits_of_full_waves
from .measured import fitted


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What a split of the weight gradient costs beside its blocks of rows."""

    program_blocks: int  # blocks that take as long as starting and ending a program
    bytes_of_block: int  # of partials, which are stored and added up in the time of one block
    worthwhile_share: float  # of the time, which more splits must not exceed: partials take memory, too


COSTS = fitted("gemm_gemm", SplitCosts)


def chosen_tiles(kernel: str, problem: Any, device: Device) -> TileConfig | None:
    """The tiles of a kernel, and of the sm90 one where that computes the problem."""
    tiles = generic_tiles(kernel, problem, device)
    sm90 = None if tiles is None else _on_sm90(kernel, problem, device)
    return tiles if tiles is None or sm90 is None else replace(tiles, sm90=sm90)


def generic_tiles(kernel: str, problem: Any, device: Device) -> TileConfig | None:
    """The tiles of the generic kernel, or None where its widths do not fit on chip."""
    width = max(problem.K, problem.O)
    return tile_config(kernel, device.architecture, problem.format.bits, problem.gated, width)


def all_on_sm90(problem: Any, device: Device) -> bool:
    """Whether sm90 kernels compute all of the problem."""
    return all(_on_sm90(kernel, problem, device) is not None for kernel in problem.kernels)


def stored_tiles(problem: Any, device: Device) -> StoredConfig | None:
    """How the backward pass stores what is hidden, or None where it recomputes: where it must, or is as fast."""
    everything = problem.needs_data_gradient and problem.needs_weight_gradient
    if problem.operation != "ffn" or problem.recompute is True or not everything or not all_on_sm90(problem, device):
        return None
    return stored_config(problem.gated, problem.K, problem.N, problem.O, device.sms, device.triton_release)


def _on_sm90(kernel: str, problem: Any, device: Device) -> Sm90Config | None:
    if device.backend_for(problem.dtype) == GENERIC or problem.dropout:
        return None
    sizes = (problem.batch, problem.M, problem.K, problem.N, problem.O)
    return sm90_config(kernel, problem.gated, *sizes, device.sms)


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
    """One, or as many as some waves of programs hold: whichever has the fewest blocks of ``rows`` one after another.

    No split is shorter than pays, and the partials stay within their limit.
    """
    limit = PARTIALS_LIMIT
    if problem.recompute is True:
        # Partials of few units and many splits could be larger than the hidden itself.
        limit = min(limit, ffn_chunked.workspace_limit(problem), 4 * problem.batch * problem.M * problem.N - 1)
    blocks, partial_bytes = -(-problem.M // rows), problem.partial_bytes
    most = min(-(-blocks // SHORTEST_SPLIT), limit // partial_bytes)
    fastest, *more = splits_of_full_waves(tiles, at_once, most)
    least = -(-tiles // at_once) * (blocks + COSTS.program_blocks)
    for splits in more:
        one_after_another = -(-tiles * splits // at_once) * (-(-blocks // splits) + COSTS.program_blocks)
        taken = one_after_another + splits * partial_bytes // COSTS.bytes_of_block
        if taken < COSTS.worthwhile_share * least:
            fastest, least = splits, taken
    return fastest
