"""Which operands of experts lie as TMA takes them; what does not runs in the generic kernels."""

from collections.abc import Sequence

import torch

from ..hopper import ALIGNMENT, Matrix, stacked
from ..matmul.sm90.ring import TILE
from .sorting import SortedRows


def stacked_alike(weights: Sequence[torch.Tensor], step: int) -> list[Matrix] | None:
    """Weights ``[experts, out, in]`` that are multiplied side by side, or None where they do not lie alike.

    Where weights lie transposed, the inner axis of an expert ends where that of the next one begins: it must be whole
    steps.
    """
    found = [each for each in map(stacked, weights) if each is not None]
    if len(found) < len(weights) or len({(each.transposed, each.step) for each in found}) > 1:
        return None
    return None if found[0].transposed and weights[0].shape[2] % step else found


def storable(columns: int, dtype: torch.dtype, rows: SortedRows) -> bool:
    """Whether TMA stores contiguous rows of so many columns, and a tile of rows is of one expert."""
    return columns * dtype.itemsize % ALIGNMENT == 0 and rows.block == TILE.value
