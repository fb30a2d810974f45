"""The weight and bias gradient for Hopper: a warp-specialised kernel in Gluon, beside the portable one.

It takes 16-bit operands whose rows lie as TMA wants them; anything else runs in the portable kernel.
"""

from .both_gradients import launch_weight_gradient, prepare_weight_gradient

__all__ = ["launch_weight_gradient", "prepare_weight_gradient"]
