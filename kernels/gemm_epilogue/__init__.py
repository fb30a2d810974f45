"""Products of the wide FFN with what follows them in their epilogue.

    Z = x W_upᵀ + b_up             Zg = x W_gateᵀ + b_gate                        (gated)
    H = act(Z)                     H = act(Zg) ⊙ Z                                (gated)
    dH = dy W_down
    dZ = dH ⊙ act'(Z)              dZ = dH ⊙ act(Zg),  dZg = dH ⊙ Z ⊙ act'(Zg)   (gated)
    db_up = Σ_m dZ                 db_gate = Σ_m dZg                             (gated)

Shapes: x [M, K], w_up and w_gate [N, K], dy [M, O], w_down [O, N], Z, Zg, H and their gradients [M, N], db_up and
db_gate [N]. ``hidden`` computes H, with Z and Zg where a backward pass will read them; ``hidden_gradient`` the
gradients with their sums, and H once more where the gradient of w_down needs it. dH stays on chip. Where the tiles
have no inner axis, torch computes those products as well: ``hidden`` reads Z and Zg then, and ``hidden_gradient`` finds
dH where it stores dZ.

The products that remain, y = H W_downᵀ, dx = dZ W_up and the weight gradients, are matrices in and matrices out:
cuBLAS, which shares what it copies in clusters of SMs, was faster there, and nothing is left to fuse. But where
the hidden is in memory in groups of units only, dx is a sum over them in float32: ``data_gradient``, on Hopper, reads
and writes that sum in its epilogue.

Where a weight is adapted by a product of low rank, x (W + s B A)ᵀ, a second product u Bᵀ with u = s x Aᵀ ``[M, R]``
joins the first one on chip, and v A with v = s dy B joins dH: ``matmul/low_rank.py``.

Sums over rows are float32 partials of every band of rows, added up in a fixed order by ``kernels.partials`` and rounded
once: no atomics, the same bits every time. The files beside this one hold the generic kernels, of any
strides and sizes, and launch those of ``matmul/sm90`` where the plan names them and the operands lie as TMA
wants them.
"""

from ..hopper import Scaled
from ..matmul.low_rank import LowRank, aligned_columns
from ..matmul.sm90 import data_gradient
from .hidden import hidden
from .hidden_gradient import HiddenGradients, hidden_gradient
from .scaled_hidden import scaled_hidden, scaled_hidden_gradient

__all__ = [
    "HiddenGradients",
    "LowRank",
    "Scaled",
    "aligned_columns",
    "data_gradient",
    "hidden",
    "hidden_gradient",
    "scaled_hidden",
    "scaled_hidden_gradient",
]
