"""Tiles of logits on Hopper, from a product that never leaves the chip: their statistics, and their gradient."""

from .gradient import gradient
from .product import takes
from .statistics import statistics

__all__ = ["gradient", "statistics", "takes"]
