"""The warp-specialised forward pass for Hopper, beside the portable one.

It takes what ``tuning.pipelined_reduce_config`` admits (16 bits, an inner dimension up to 128) without biases and
activation, where the operands lie as the copy engine needs them; see ``takes``.
"""

from .forward import reduce, takes

__all__ = ["reduce", "takes"]
