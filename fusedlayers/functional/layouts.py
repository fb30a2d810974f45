"""Whether operands lie in memory as the measured kernels read them."""

import torch
from torch import Tensor

from ..kernels.hopper import ALIGNMENT, matrix, untransposed
from ..planning.ffn_epilogue import LEAST_CHUNK_WIDTH
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
    if type(x) not in PLAIN_TENSORS or not (sizes := x.shape) or sizes[-1] < LEAST_CHUNK_WIDTH:
        return ""
    if traced() or transformed():
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
        if position >= _MATRICES or not (_readable_weight(tensor) if position else _readable(tensor)):
            return _NAMES[position]
    # One kernel reads both in one pass, and so as one layout.
    if w_gate is not None and _transposed(w_gate) != _transposed(w_up):
        return "w_gate"
    return ""


def _transposed(weight: Tensor) -> bool:
    return weight.layout is torch.strided and weight.dim() == 2 and weight.stride(1) != 1


def _readable_weight(weight: Tensor) -> bool:
    """Whether the copy engine reads it, as it is or transposed."""
    return weight.dim() == 2 and matrix(weight) is not None


def _readable(x: Tensor) -> bool:
    """Whether the copy engine reads it, a matrix or a batch of rows."""
    if x.dim() == 2:
        return untransposed(x) is not None
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:
        # Rows that are no view of it are copied before anything reads them.
        return True
    return untransposed(flat) is not None
