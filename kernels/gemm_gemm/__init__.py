"""GEMM-GEMM and the narrow FFN, forward and backward, without keeping the hidden.

Forward, per batch entry ``z`` (``B = W_upᵀ``, ``C = W_downᵀ`` of a batched GEMM-GEMM are the same strides swapped):

    Z  = x W_upᵀ + b_up              Zg = x W_gateᵀ + b_gate     (gated only)
    H  = act(Z)                      H  = act(Zg) ⊙ Z            (gated)
    Hd = H ⊙ keep / (1 - p)          y  = Hd W_downᵀ + b_down + residual

Backward, from dy, with Z (and Zg) recomputed tile by tile:

    dH  = (dy W_down) ⊙ keep / (1 - p)
    dZ  = dH ⊙ act'(Z)               dZ = dH ⊙ act(Zg),  dZg = dH ⊙ Z ⊙ act'(Zg)   (gated)
    dx  = dZ W_up + dZg W_gate                                   data-gradient kernel
    dW_up = dZᵀ x,  dW_gate = dZgᵀ x,  dW_down = dyᵀ Hd          weight-gradient kernel,
    db_up = Σ_m dZ, db_gate = Σ_m dZg                            in the same pass over x and dy
    db_down = Σ_m dy                                             data-gradient kernel on Hopper, else torch.sum

Shapes: x [Z, M, K], up and gate [Z, N, K], down [Z, O, N], y and residual [Z, M, O]; biases [N], [N], [O].
A program keeps whole rows of x (K wide) and of the accumulator (O wide) on chip: widths above the largest row of
``tuning`` do not fit. Weight gradients are split over tokens into float32 partials, summed in a fixed order by
``kernels.partials`` and rounded once: no atomics, the same bits every time.

``forward``, ``data_gradient`` and ``weight_gradients`` launch the kernels of ``sm90/`` if the plan names them and TMA
can read the operands, otherwise the generic kernels of their own files. ``stored_gradients`` is another backward pass
for layers whose weight gradients do not fit on chip together: it writes H and dZ to memory once, while it runs.
"""

from .data_gradient import data_gradient
from .forward import forward
from .operands import Arithmetic, Operands
from .stored import stored_gradients
from .weight_gradient import WeightGradients, weight_gradients

__all__ = [
    "Arithmetic",
    "Operands",
    "WeightGradients",
    "data_gradient",
    "forward",
    "stored_gradients",
    "weight_gradients",
]
