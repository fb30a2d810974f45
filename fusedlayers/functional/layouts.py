"""Whether operands lie in memory as the measured kernels read them."""

import torch
from torch import Tensor

from ..kernels.hopper import ALIGNMENT, untransposed
from ..planning.hidden_gradient import LEAST_WIDTH
from .signatures import PLAIN_TENSORS, transformed
from .tracing import traced

_PLAIN = frozenset({*PLAIN_TENSORS, type(None)})
_NAMES = ("x", "w_up", "w_down", "w_gate", "b_up", "b_gate")
_MATRICES = 4


def portable_operand(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
) -> str:
    """The name of the first operand of a wide FFN that only portable kernels can read, or an empty string.

    Narrow layers are not asked, nor is anything but plain tensors: what is traced has no address.
    """
    # Every call asks, so the answer is cheap for narrow layers, and for wide ones whose operands are contiguous.
    if type(x) not in PLAIN_TENSORS or not (sizes := x.shape) or sizes[-1] < LEAST_WIDTH or traced() or transformed():
        return ""
    operands = (x, w_up, w_down, w_gate, b_up, b_gate)
    if not _PLAIN.issuperset(map(type, operands)):
        return ""
    for position, tensor in enumerate(operands):
        # What is no matrix at all is not for here to judge.
        if tensor is None or tensor.layout is not torch.strided or not tensor.dim():
            continue
        if tensor.is_contiguous() and (position >= _MATRICES or tensor.data_ptr() % ALIGNMENT == 0):
            continue
        if position >= _MATRICES or not _readable(tensor):
            return _NAMES[position]
    return ""


def _readable(tensor: Tensor) -> bool:
    """Whether the copy engine reads it, a matrix or a batch of rows."""
    if tensor.dim() == 2:
        return untransposed(tensor) is not None
    try:
        flat = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        # Rows that are no view of it are copied before anything reads them.
        return True
    return untransposed(flat) is not None
