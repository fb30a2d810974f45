"""Weight and bias gradient of a linear layer ``y = x Wᵀ + b``, in one pass over dy.

    dW = dyᵀ x        db = Σ_m dy

Shapes: dy [M, O], x [M, K], dW [O, K], db [O]; in the sm90 kernel rows of dW are its units. A program owns a tile
of dW and walks over rows of dy and x; those of the first column of tiles also sum up dy while its rows are on chip.
Where the tiles are fewer than the SMs, rows are split: float32 partials, summed in a fixed order by
``kernels.partials`` and rounded once: no atomics, the same bits every time.

``weight_gradient`` launches the generic kernel, or that of ``matmul/sm90`` where the plan names it and the operands
lie as TMA wants them; both compute the same.
"""

from .launcher import weight_gradient

__all__ = ["weight_gradient"]
