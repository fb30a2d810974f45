"""Warp roles under their former name, for kernels that still import them from here."""

from .matmul.sm90.roles import specialize

__all__ = ["specialize"]
