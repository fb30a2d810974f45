"""With which tiles the kernels of a GEMM-GEMM or an FFN compute a problem."""

from dataclasses import replace
from typing import Any

from ..kernels.tuning import PipelinedConfig, StoredConfig, TileConfig, pipelined_config, stored_config, tile_config
from .devices import GENERIC, Device


def chosen_tiles(kernel: str, problem: Any, device: Device) -> TileConfig | None:
    """The tiles of a kernel, and of the pipelined one where that computes the problem."""
    tiles = portable_tiles(kernel, problem, device)
    pipelined = None if tiles is None else _pipelined(kernel, problem, device)
    return tiles if tiles is None or pipelined is None else replace(tiles, pipelined=pipelined)


def portable_tiles(kernel: str, problem: Any, device: Device) -> TileConfig | None:
    """The tiles of the portable kernel, or None where its widths do not fit on chip."""
    width = max(problem.K, problem.O)
    return tile_config(kernel, device.architecture, problem.format.bits, problem.gated, width)


def all_pipelined(problem: Any, device: Device) -> bool:
    """Whether pipelined kernels compute all of the problem."""
    return all(_pipelined(kernel, problem, device) is not None for kernel in problem.kernels)


def stored_tiles(problem: Any, device: Device) -> StoredConfig | None:
    """How the backward pass stores what is hidden, or None where it recomputes: where it must, or is as fast."""
    everything = problem.needs_data_gradient and problem.needs_weight_gradient
    if problem.operation != "ffn" or problem.recompute is True or not everything or not all_pipelined(problem, device):
        return None
    return stored_config(problem.gated, problem.K, problem.N, problem.O, device.sms, device.triton_release)


def _pipelined(kernel: str, problem: Any, device: Device) -> PipelinedConfig | None:
    if device.backend_for(problem.dtype) == GENERIC or problem.dropout:
        return None
    sizes = (problem.batch, problem.M, problem.K, problem.N, problem.O)
    return pipelined_config(kernel, problem.gated, *sizes, device.sms)
