"""Tiles of logits on Hopper, from a product that never leaves the chip: their statistics, and their gradient."""

import torch

from ...hopper import Matrix, untransposed
from .gradient import gradient
from .statistics import statistics


def takes(x: torch.Tensor, linear_weight: torch.Tensor) -> tuple[Matrix, Matrix] | None:
    """Both as matrices for TMA, or None where these kernels do not compute their product."""
    left, right = untransposed(x), untransposed(linear_weight)
    return None if left is None or right is None else (left, right)


__all__ = ["gradient", "statistics", "takes"]
