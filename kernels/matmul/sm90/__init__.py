"""Products on Hopper: warp-specialised kernels in Gluon.

A kernel is put together from a schedule (``schedules``), the ring of stages and its load warp (``ring``, ``loading``),
a mainloop (``pingpong`` or ``cooperative``), and a prologue and an epilogue of its own. They take 16-bit operands that
lie as TMA wants them; anything else runs in the generic kernels, which compute the same.
"""

from .data_gradient import data_gradient
from .grouped_product import prepare_product
from .grouped_weight_gradient import prepare_grouped_weight_gradient
from .hidden import prepare_hidden
from .hidden_gradient import prepare_hidden_gradient
from .weight_gradient import prepare_weight_gradient

__all__ = [
    "data_gradient",
    "prepare_grouped_weight_gradient",
    "prepare_hidden",
    "prepare_hidden_gradient",
    "prepare_product",
    "prepare_weight_gradient",
]
