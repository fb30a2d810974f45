"""Products of rows sorted by expert for Hopper: warp-specialised kernels in Gluon, beside the portable ones.

Those with an activation are the wide FFN's, with an expert for each tile; the kernels of the others are in this folder,
with a mainloop of their own. They take 16-bit operands that lie as TMA wants them; anything else runs in the portable
kernels, over the same rows.
"""

from .launching import hidden, hidden_gradient, product, weight_gradient
from .order import longest_first

__all__ = ["hidden", "hidden_gradient", "longest_first", "product", "weight_gradient"]
