"""Typed resources, which device functions take instead of long lists of arguments, and their launch-time values."""

from collections import namedtuple
from typing import Any, NamedTuple

import torch

_Operand = namedtuple("_Operand", "ptr stride_batch stride_row stride_inner rows inner")
_Bias = namedtuple("_Bias", "ptr stride_batch stride columns")
# A matrix of any strides, or a batch of them; a transpose swaps two strides. Absent if ``ptr`` is None. Type checkers
# do not know how many strides are unpacked into it.
Operand: Any = _Operand
# A vector, or a batch of them. Absent if ``ptr`` is None.
Bias: Any = _Bias
# H, and Z and Zg or None: contiguous, with ``width`` columns in memory.
HiddenOutputs = namedtuple("HiddenOutputs", "hidden_ptr z_ptr gate_ptr row_limit width")
# The result, or the float32 partials ``[splits, rows, columns]``: contiguous.
ProductOutput = namedtuple("ProductOutput", "ptr rows columns row_limit")
# Z, Zg or None, and a contiguous addend of dH or None.
PreActivations = namedtuple("PreActivations", "z_ptr gate_ptr added_ptr stride_zm stride_zn stride_gm stride_gn")
# dZ and dZg with a row stride of ``stride``, and the hidden or None.
GradientOutputs = namedtuple("GradientOutputs", "dz_ptr d_gate_ptr hidden_ptr stride stride_hidden")
# Slots and routing weights of sorted rows, and their sums, stored for tile column ``column``; None for dense rows.
SortedTokens = namedtuple("SortedTokens", "slots_ptr weights_ptr sums_ptr column")


class RowOrder(NamedTuple):
    """How rows are sorted by expert: in blocks of ``block`` rows, with ``top_k`` slots for each token.

    ``gathered`` operands have the sorted rows; from others, which have the tokens, the kernel gathers the rows.
    """

    block: int = 1
    top_k: int = 1
    gathered: bool = True


DENSE = RowOrder()


def strides(tensor: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """The strides of an operand, padded in front with 0 to ``axes`` axes; all 0 for None."""
    found = () if tensor is None else tensor.stride()
    return (*(0,) * (axes - len(found)), *found)
