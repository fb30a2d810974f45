"""What all kernels of experts have in common: what is computed besides the tensors, and gradients."""

from typing import NamedTuple

import torch

from ..matmul.arithmetic import Arithmetic

__all__ = ["Arithmetic", "HiddenGradients"]


class HiddenGradients(NamedTuple):
    """dZ, dG and w ⊙ H ``[P, N]``, which are 0 in padding, and partial sums of the gradient of w; None if not asked.

    ``partials`` ``[T, P]``: of every row the sums of dH' ⊙ H over the columns of one tile, without the row's weight.
    """

    dz: torch.Tensor
    dg: torch.Tensor | None
    weighted_hidden: torch.Tensor | None
    partials: torch.Tensor | None
