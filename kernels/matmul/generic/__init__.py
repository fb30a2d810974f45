"""Products in generic Triton, for every GPU, any sizes and any strides.

A kernel is composed of four parts, which are device functions over the typed resources of ``operands.py``:

    schedule    which tile of the result a program owns, and which rows or which range of the inner axis it multiplies
    prologue    what the accumulator starts with
    mainloop    acc += left_tile @ right_tile along the inner axis: the only one there is
    epilogue    what becomes of the accumulator while it is in registers

Dense rows and rows sorted by expert are one kernel each: without the pointer to the experts of the tiles, everything
about experts is left out when the kernel is compiled. Beside each kernel stands the function that prepares its launch,
which the packages of the operations run.
"""

from .hidden import prepare_hidden
from .hidden_gradient import prepare_hidden_gradient
from .product import prepare_product
from .weight_gradient import prepare_weight_gradient

__all__ = ["prepare_hidden", "prepare_hidden_gradient", "prepare_product", "prepare_weight_gradient"]
