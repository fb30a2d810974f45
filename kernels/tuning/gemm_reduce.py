"""GEMM-reduce: kernel, architecture, dtype and inner width -> tile configuration.

Rows of every architecture are conservative ones that were compiled for it.
"""

from dataclasses import dataclass
from typing import Any

from .limits import padded_width

# Columns of the inner dimension that one step of a product takes at most; a wider one is computed in several.
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
    """The tiles of the forward pass for products of inner dimension ``width``."""
    padded = padded_width(width)
    if element_bits == 32:
        return ReduceConfig(64, 64, min(padded, 32), 4, 2)
    if architecture == "sm_90":
        # In several steps 128 columns of the inner dimension at once spilled registers.
        return ReduceConfig(64, 128, padded if padded <= WIDEST_BLOCK else 64, 4, 3 if padded > 64 else 4)
    return ReduceConfig(64, 64, min(padded, 64), 4, 2)


def reduce_gradient_config(architecture: str, element_bits: int, width: int, indexed: bool) -> ReduceConfig:
    """The tiles of the gradients: ``block_p`` rows of the gradient, ``block_r`` of the axis it sums over.

    An accumulator has ``block_k`` columns of the gradient; a wider one is shared out among programs, each of which
    computes the first product for itself. ``indexed`` is the gradient through an index.
    """
    # With 16 columns Triton 3.7 made the products of sm_90 wait for one another.
    padded = max(padded_width(width), 32)
    if element_bits == 32:
        return ReduceConfig(32, 32, min(padded, 64), 4, 1)
    if indexed:
        # The matrix of weights is made in registers: with more than one stage its products wait for one another.
        return ReduceConfig(64, 64, padded if padded <= 256 and architecture == "sm_90" else min(padded, 128), 4, 1)
    if padded <= 128:
        return ReduceConfig(64, 64, padded, 4, 2)
    if padded == 256 and architecture == "sm_90":
        return ReduceConfig(64, 32, 256, 4, 2)
    return ReduceConfig(64, 64, 128 if architecture == "sm_90" else 64, 4, 2)
