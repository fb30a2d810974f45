"""The warp-specialised kernels for Hopper, beside the generic ones: the forward pass, and the gradient of maxima.

They take 16 bits and an inner dimension up to 128, the forward pass without biases and activation, where the operands
lie as TMA needs them.
"""

from .forward import prepare_reduce, takes
from .one_hot import prepare_one_hot, takes_one_hot

__all__ = ["prepare_one_hot", "prepare_reduce", "takes", "takes_one_hot"]
