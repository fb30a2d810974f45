"""Typed resources: what device functions take instead of long lists of arguments; and how launches describe them."""

from collections import namedtuple
from typing import NamedTuple

import torch

# A matrix of any strides, or a batch of them; a transpose is a swap of two strides. Without a pointer it is no matrix.
Operand = namedtuple("Operand", "ptr stride_batch stride_row stride_inner rows inner")
# A vector, or a batch of them; without a pointer there is none.
Bias = namedtuple("Bias", "ptr stride_batch stride columns")
# What ``dropout.keep_factor`` takes; without a pointer nothing is dropped.
DropoutNumbers = namedtuple("DropoutNumbers", "seed_ptr limit scale row column")
# H, and Z and Zg or None: contiguous, of ``width`` columns in memory.
HiddenOutputs = namedtuple("HiddenOutputs", "hidden_ptr z_ptr gate_ptr row_limit width")
# The result, or the float32 partial sums of one split after the other: contiguous.
ProductOutput = namedtuple("ProductOutput", "ptr rows columns row_limit")
# Z, and Zg or None; and what is added to dH, contiguous, or None.
PreActivations = namedtuple("PreActivations", "z_ptr gate_ptr added_ptr stride_zm stride_zn stride_gm stride_gn")
# dZ and dZg, whose rows are ``stride`` elements apart, and the hidden or None.
GradientOutputs = namedtuple("GradientOutputs", "dz_ptr d_gate_ptr hidden_ptr stride stride_hidden")
# The slots of sorted rows, their weights, and the sums of this column of tiles for each row; None for dense rows.
SortedTokens = namedtuple("SortedTokens", "slots_ptr weights_ptr sums_ptr column")


class RowOrder(NamedTuple):
    """How rows are sorted by expert: in blocks of ``block`` rows, with ``top_k`` slots for each token.

    Operands that are ``gathered`` have the sorted rows, others the tokens.
    """

    block: int = 1
    top_k: int = 1
    gathered: bool = True


DENSE = RowOrder()


def strides(tensor: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """The strides of an operand with so many axes: 0 of those in front that it does not have, and of None."""
    found = () if tensor is None else tensor.stride()
    return (*(0,) * (axes - len(found)), *found)
