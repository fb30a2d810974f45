"""A matrix product with few rows and columns and a long inner axis, which is split over the SMs.

    Y = act(Σ_s X_s W_sᵀ + b)

Shapes: left [M, K], right [N, K], out [M, N], bias [N]; any strides, so that transposed operands are views. The forward
product of a linear layer is ``x [M, K]`` with ``W [N, K]``; its data gradient ``dx = dz W`` is ``dz [M, N]`` with
``Wᵀ [K, N]``, which sums over N. The weight gradient is in ``kernels.weight_gradient``.

A program multiplies the range s of the inner axis for one tile of the result. Where there is more than one range, its
float32 partial goes to a workspace ``[S, M, N]``, and ``kernels.partials`` adds the partials in a fixed order, applies
bias and activation, and rounds once: the same bits every time. The reducing kernel is launched as dependent: its
programs are in place when the last partial is written. Atomic addition into one float32 ``[M, N]`` is there on request.

``product`` launches the product of ``matmul.generic`` (matrix units), or for one row ``row_product`` (multiply-adds on
rows of the right operand as they arrive from memory: there is nothing to share that a matrix unit would need).
"""

from .launcher import product

__all__ = ["product"]
