"""The warp-specialised kernels for Hopper, beside the generic ones: the forward pass, and the gradient of maxima.

They take 16-bit operands of an inner dimension up to 128 that TMA can read; the forward pass has neither biases nor an
activation.
"""

from .forward import prepare_reduce, takes
from .one_hot import prepare_one_hot, takes_one_hot

__all__ = ["prepare_one_hot", "prepare_reduce", "takes", "takes_one_hot"]
