"""Sums of rows."""

from torch import Tensor


def row_sums(x: Tensor) -> Tensor:
    """``Σ_n x``: x ``[M, N]`` -> ``[M]``; any dtype."""
    return x.sum(-1)
