"""Products of the wide FFN with what follows them in their epilogue.

    dH = dy W_down
    dZ = dH ⊙ act'(Z)              dZ = dH ⊙ act(Zg),  dZg = dH ⊙ Z ⊙ act'(Zg)   (gated)
    db_up = Σ_m dZ                 db_gate = Σ_m dZg                             (gated)

Shapes: dy [M, O], w_down [O, N], z and z_gate [M, N], dz and dz_gate [M, N], db_up and db_gate [N]. dH stays on chip.
A program owns some tiles below one another, whose sums over the rows it adds up itself; those of all programs are
float32 partials, summed in a fixed order by ``kernels.partials`` and rounded once: no atomics, the same bits every
time. One kernel for any strides and sizes.
"""

from .hidden_gradient import hidden_gradient

__all__ = ["hidden_gradient"]
