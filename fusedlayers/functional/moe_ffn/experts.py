"""The operands of a call: their positions, and weights and biases in one layout."""

from typing import Any, NamedTuple

from torch import Tensor

from ..operation import Tensors
from ..prepared import Prepared

X, INDEX, SCORES, W_UP, W_DOWN, W_GATE, B_UP, B_DOWN, B_GATE = range(9)


class Experts(NamedTuple):
    """Weights ``[E, out, in]`` and biases ``[E, out]``, or their gradients, as views of whatever layout a call has.

    Each is a tensor or None.
    """

    w_up: Any
    w_down: Any
    w_gate: Any
    b_up: Any
    b_down: Any
    b_gate: Any

    @classmethod
    def of(cls, call: Prepared, tensors: Tensors) -> "Experts":
        """From the operands after x and the routing, in their order."""
        w_up, w_down, w_gate, b_up, b_down, b_gate = tensors
        layout = call.extras["gate_and_up"]
        if call.extras["transposed"]:
            w_up, w_down, w_gate = (None if each is None else each.mT for each in (w_up, w_down, w_gate))
        if layout != "separate":
            w_up, w_gate = halves(w_up, layout)
            b_up, b_gate = halves(b_up, layout)
        return cls(w_up, w_down, w_gate, b_up, b_down, b_gate)


def halves(merged: Tensor | None, layout: str) -> tuple[Any, Any]:
    """(up, gate) of a merged weight ``[E, 2 N, K]`` or bias ``[E, 2 N]``."""
    if merged is None:
        return None, None
    if layout == "interleaved":
        return merged[:, 1::2], merged[:, ::2]
    units = merged.shape[1] // 2
    return merged[:, units:], merged[:, :units]
