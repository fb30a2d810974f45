"""Batched GEMM-reduce, forward and backward, without ever writing the product.

One orientation serves a reduction over the rows and over the columns of a product (the operands change roles):

    C[z,p,r] = act(kept[z,p] · reduced[z,r] + kept_bias[p] + reduced_bias[r])
    D[z,p]   = ⊕_r C[z,p,r]        ⊕ in sum, mean, max, min, absmax, sumsq, logsumexp

Shapes: kept [Z, P, K], reduced [Z, R, K] or packed [T, K], D [Z, P]; a mask [Z, R], lengths [Z] or, for packed rows,
offsets [Z + 1] say which r are reduced. The others count as the operation's identity (0, -inf, +inf); mean divides by
the number of reduced rows.

The reduced axis is the column axis of every tile, so that a reduction stays inside a warp group. If the tiles of the
kept axis do not fill the device, the reduced axis is split; float32 partials are combined in a fixed order. Of equal
values the first index wins, and the first NaN wins over everything, as in torch.max. ``reduction.py`` is the epilogue
of both the generic and the sm90 kernel. ``backward.py`` describes the gradients; ``one_pass.py`` computes both at once
if few rows are kept.
"""

from .backward import kept_gradient, reduced_gradient, route
from .forward import reduce
from .one_pass import both_gradients
from .operands import OPERATIONS, ReduceArithmetic, ReduceOperands

__all__ = [
    "OPERATIONS",
    "ReduceArithmetic",
    "ReduceOperands",
    "both_gradients",
    "kept_gradient",
    "reduce",
    "reduced_gradient",
    "route",
]
