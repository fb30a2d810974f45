"""With which tiles the kernels of a GEMM-GEMM or an FFN compute a problem."""

from dataclasses import replace
from typing import Any

from ..kernels.tuning import Sm90Config, StoredConfig, TileConfig, sm90_config, stored_config, tile_config
from ..kernels.tuning.dtypes import GENERIC
from .devices import Device


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
