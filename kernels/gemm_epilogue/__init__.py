"""Products of the wide FFN with fused epilogues.

    Z = x W_upᵀ + b_up             Zg = x W_gateᵀ + b_gate                        (gated)
    H = act(Z)                     H = act(Zg) ⊙ Z                                (gated)
    dH = dy W_down
    dZ = dH ⊙ act'(Z)              dZ = dH ⊙ act(Zg),  dZg = dH ⊙ Z ⊙ act'(Zg)   (gated)
    db_up = Σ_m dZ                 db_gate = Σ_m dZg                             (gated)

Shapes: x [M, K], w_up and w_gate [N, K], dy [M, O], w_down [O, N], Z, Zg, H and their gradients [M, N], db_up and
db_gate [N]. ``hidden`` computes H, with Z and Zg if a backward pass will read them; ``hidden_gradient`` computes the
gradients with their sums, and H once more if the gradient of w_down needs it. dH stays on chip. With tiles whose
``block_inner`` is 0, torch computes these products: ``hidden`` then reads Z and Zg, and ``hidden_gradient`` reads dH
from the memory of dZ.

The remaining products, y = H W_downᵀ, dx = dZ W_up and the weight gradients, have nothing to fuse, and cuBLAS, which
multicasts its loads within clusters of SMs, was faster there. But if the hidden is computed in groups of units, dx is a
float32 sum over the groups: ``data_gradient``, on Hopper, reads and writes that sum in its epilogue.

If a weight has a low-rank adapter (LoRA), x (W + s B A)ᵀ, a second product u Bᵀ with u = s x Aᵀ ``[M, R]`` is added to
the first one on chip, and v A with v = s dy B to dH: ``matmul/low_rank.py``.

Sums over rows are float32 partials of bands of rows, added up in a fixed order by ``kernels.partials`` and rounded
once: no atomics, the same bits every time. The launchers here run the kernels of ``matmul/generic``, for any strides
and sizes, or those of ``matmul/sm90`` if the plan names them and TMA can read the operands.
"""

from ..hopper import Scaled
from ..matmul.low_rank import LowRank, aligned_columns
from ..matmul.sm90 import data_gradient
from .hidden import hidden
from .hidden_gradient import HiddenGradients, hidden_gradient
from .scaled_hidden import scaled_hidden, scaled_hidden_gradient
from .scaled_product import scaled_product

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
    "scaled_product",
]
