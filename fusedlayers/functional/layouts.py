"""Whether operands lie in memory as the measured kernels read them."""

from torch import Tensor

from ..kernels.hopper import ALIGNMENT, untransposed
from ..planning.hidden_gradient import LEAST_WIDTH
from .tracing import PLAIN_TENSORS, traced, transformed


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
    if type(x) not in PLAIN_TENSORS or not x.dim() or x.shape[-1] < LEAST_WIDTH or traced() or transformed():
        return ""
    operands = {"x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up, "w_gate": w_gate, "b_gate": b_gate}
    if any(tensor is not None and type(tensor) not in PLAIN_TENSORS for tensor in operands.values()):
        return ""
    return next((name for name, tensor in operands.items() if tensor is not None and not _readable(tensor)), "")


def _readable(tensor: Tensor) -> bool:
    # Most are, and these two questions cost the host little.
    if tensor.is_contiguous() and (tensor.dim() < 2 or tensor.data_ptr() % ALIGNMENT == 0):
        return True
    if tensor.dim() < 2:
        return False
    if tensor.dim() == 2:
        return untransposed(tensor) is not None
    try:
        flat = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        # Rows that are no view of it are copied before anything reads them.
        return True
    return untransposed(flat) is not None
