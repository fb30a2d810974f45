"""Products in generic Triton, for every GPU, any sizes and any strides.

A kernel is composed of four parts, which are device functions over the typed resources of ``operands.py``:

    schedule    which tile of the result a program owns, and which rows or which range of the inner axis it multiplies
    prologue    what the accumulator starts with
    mainloop    acc += left_tile @ right_tile along the inner axis: one for all kernels
    epilogue    what is done to the accumulator while it is in registers

One kernel serves dense rows and rows sorted by expert: if the pointer to the experts of the tiles is None, all code for
experts is compiled out. Each file has a kernel and the function that prepares its launch, which the packages of the
operations run.
"""

from .hidden import prepare_hidden
from .hidden_gradient import prepare_hidden_gradient
from .product import prepare_product
from .weight_gradient import prepare_weight_gradient

__all__ = ["prepare_hidden", "prepare_hidden_gradient", "prepare_product", "prepare_weight_gradient"]
