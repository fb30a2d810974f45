"""The warp-specialised kernels for Hopper, beside the portable ones: the forward pass, and the gradient of maxima.

They take 16 bits and an inner dimension up to 128, the forward pass without biases and activation, where the operands
lie as TMA needs them.
"""

from .forward import reduce, takes
from .one_hot import one_hot_product, takes_one_hot

__all__ = ["one_hot_product", "reduce", "takes", "takes_one_hot"]
