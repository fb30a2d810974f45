"""What all kernels of experts have in common: what is computed besides the tensors, single elements, and tiles.

With a limit the hidden is ``act(min(g, limit)) ⊙ (clamp(z, -limit, limit) + offset)``, else ``act(g) ⊙ (z + offset)``.
"""

import math
from typing import NamedTuple

import torch

from ..activations import limited_hidden_and_slopes as hidden_and_slopes
from ..device import tl, triton
from ..tiles import add_product, load_tile

__all__ = ["Arithmetic", "HiddenGradients", "add_rows_times_weight", "hidden_and_slopes"]


class Arithmetic(NamedTuple):
    """``accuracy`` is that of activations: see ``kernels.activations``."""

    activation: str
    accuracy: str
    input_precision: str = "ieee"
    limit: float | None = None
    offset: float = 0.0

    @property
    def clamped(self) -> bool:
        """Whether limit or offset say anything."""
        return self.limit is not None or self.offset != 0

    @property
    def numbers(self) -> tuple[float, float]:
        """(limit, offset) as kernels take them."""
        return math.inf if self.limit is None else self.limit, self.offset


class HiddenGradients(NamedTuple):
    """dZ, dG and w ⊙ H ``[P, N]``, which are 0 in padding, and partial sums of the gradient of w; None if not asked.

    ``partials`` ``[T, P]``: of every row the sums of dH' ⊙ H over the columns of one tile, without the row's weight.
    """

    dz: torch.Tensor
    dg: torch.Tensor | None
    weighted_hidden: torch.Tensor | None
    partials: torch.Tensor | None


@triton.jit
def add_rows_times_weight(
    acc, a_ptr, w_ptr, rows, cols, stride_am, stride_ak, stride_wn, stride_wk, row_limit, N, inner, zero,
    BLOCK_INNER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc + a wᵀ`` for rows of a and an expert's weight ``[N, inner]``; ``zero`` is 0, unknown to the compiler."""
    for k in tl.range(0, inner, BLOCK_INNER):
        place = k + tl.arange(0, BLOCK_INNER)
        a_tile = load_tile(a_ptr, rows, place, stride_am, stride_ak, row_limit, inner)
        w_tile = load_tile(w_ptr, place, cols, stride_wk, stride_wn, inner, N)
        acc = add_product(acc, a_tile, w_tile, zero, INPUT_PRECISION)
    return acc
