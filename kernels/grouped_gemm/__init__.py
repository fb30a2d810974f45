"""Experts: the FFN of a Transformer over rows that are sorted by expert.

    xs = x[slots / k]                                 the rows of all experts, one expert after another
    Z = xs W_upᵀ + b_up,  G = xs W_gateᵀ + b_gate     (gated)
    H = act(Z), gated act(G) ⊙ Z
    ys = H W_downᵀ + b_down,  y[m] = Σ_j w[m, j] ys[row of (m, j)]

    dys = dy[slots / k],  dH' = dys W_down            without the weights of the rows
    dw = Σ_n dH' ⊙ H + dy · b_down,  dH = w ⊙ dH'
    dZ = dH ⊙ act'(Z),  gated dH ⊙ act(G),  dG = dH ⊙ Z ⊙ act'(G)
    dxs = dZ W_up + dG W_gate,  dx[m] = Σ_j dxs[row of (m, j)]
    dW_up = dZᵀ xs,  dW_gate = dGᵀ xs,  dW_down = dysᵀ (w ⊙ H),  db_up = Σ dZ,  db_down = Σ w dys    of each expert

Shapes: x [M, K], xs [P, K], w [M, k], W_up and W_gate [E, N, K], W_down [E, K, N], Z, G and H [P, N]. Every W and b is
that of the row's expert. ``sorting`` defines the P rows: those of an expert begin at a multiple of a block, and the
padding between experts is 0 in xs, dys, dZ, dG and w ⊙ H, so that sums over an expert's rows need no masks. No atomics:
the same bits every time. Nothing is copied to the host, so a CUDA graph serves any routing. Operands
of a product may be in 8 bits with scales.
"""

from ..matmul.arithmetic import Arithmetic
from .moving import combine, expert_sums, score_gradient, spread
from .products import HiddenGradients, hidden, hidden_gradient, product, scaled_weight_gradient, weight_gradient
from .sorting import SortedRows, longest_first, rows_of, sizes, sort

__all__ = [
    "Arithmetic",
    "HiddenGradients",
    "SortedRows",
    "combine",
    "expert_sums",
    "hidden",
    "hidden_gradient",
    "longest_first",
    "product",
    "rows_of",
    "scaled_weight_gradient",
    "score_gradient",
    "sizes",
    "sort",
    "spread",
    "weight_gradient",
]
