"""GEMM-reduce: kernel, architecture, dtype and inner width -> tile configuration.

Rows of every architecture are conservative ones that were compiled for it.
"""

from dataclasses import dataclass
from typing import Any

from .limits import padded_width

# Columns of the inner dimension that one step of a product takes; a wider one is computed in several.
WIDEST_BLOCK = 128


@dataclass(frozen=True)
class ReduceConfig:
    """Tile of a kernel: kept rows × reduced rows × inner columns, its warps, and the depth of its software pipeline.

    ``pipelined`` is what runs instead where the operands lie as its copies need them.
    """

    block_p: int
    block_r: int
    block_k: int
    num_warps: int
    num_stages: int
    pipelined: Any = None


def reduce_config(architecture: str, element_bits: int, width: int) -> ReduceConfig:
    """The forward tiles for products of inner dimension ``width``."""
    padded = padded_width(width)
    if element_bits == 32:
        return ReduceConfig(64, 64, min(padded, 32), 4, 2)
    if architecture == "sm_90":
        return ReduceConfig(64, 128, min(padded, WIDEST_BLOCK), 4, 3 if padded > 64 else 4)
    return ReduceConfig(64, 64, min(padded, 64), 4, 2)
