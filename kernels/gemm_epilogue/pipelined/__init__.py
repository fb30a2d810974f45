"""The products of the wide FFN for Hopper: warp-specialised kernels in Gluon, beside the portable ones.

They take 16-bit operands whose rows lie as TMA wants them; anything else runs in the portable kernels.
``products.py`` holds what they share: the copies of the operands and the product of one tile.
"""

from .data_gradient import data_gradient
from .hidden import launch_hidden, prepare_hidden
from .hidden_gradient import launch_hidden_gradient, prepare_hidden_gradient

__all__ = [
    "data_gradient",
    "launch_hidden",
    "launch_hidden_gradient",
    "prepare_hidden",
    "prepare_hidden_gradient",
]
