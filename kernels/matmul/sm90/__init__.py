"""Products on Hopper: warp-specialised kernels in Gluon.

A kernel is composed of a schedule (``schedules``), the ring of stages and its load warp (``ring``, ``loading``), a
mainloop (``pingpong`` or ``cooperative``), and a prologue and an epilogue of its own. TMA must be able to read the
operands, of 16 bits (in some kernels also 8, with scales). Other layouts run in the generic kernels.
"""

from .data_gradient import data_gradient
from .grouped_product import prepare_product
from .grouped_weight_gradient import prepare_grouped_weight_gradient
from .hidden import prepare_hidden
from .hidden_gradient import prepare_hidden_gradient
from .scaled_product import prepare_scaled_product
from .weight_gradient import prepare_weight_gradient

__all__ = [
    "data_gradient",
    "prepare_grouped_weight_gradient",
    "prepare_hidden",
    "prepare_hidden_gradient",
    "prepare_product",
    "prepare_scaled_product",
    "prepare_weight_gradient",
]
