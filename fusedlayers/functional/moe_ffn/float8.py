"""The weights of experts in 8 bits, with a scale for each row of each expert, kept between the calls of one step."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ...kernels.float8 import quantise_rows, quantise_transposed
from ...kernels.hopper import Scaled
from ..float8 import from_weights
from ..operation import Tensors
from ..prepared import Prepared
from .experts import W_DOWN, W_GATE, W_UP, halves

_Made = TypeVar("_Made")


def up_and_gate(call: Prepared, operands: Tensors) -> tuple[Scaled, Scaled | None]:
    """W_up and W_gate ``[E, N, K]``, no gate without one."""

    def make(weight: Tensor, other: Tensor | None = None) -> tuple[Scaled, Scaled | None]:
        first, layout = _by_rows(weight, call), call.extras["gate_and_up"]
        if layout == "separate":
            return first, None if other is None else _by_rows(other, call)
        # One half of a merged weight is no matrix of rows.
        values, scales = halves(first.values, layout), halves(first.scale, layout)
        up, gate = (Scaled(of_part, scale.contiguous()) for of_part, scale in zip(values, scales, strict=True))
        return up, gate

    return _kept(call, operands, "rows", make, W_UP, W_GATE)


def down(call: Prepared, operands: Tensors) -> Scaled:
    """W_down ``[E, K, N]``."""
    return _kept(call, operands, "rows", lambda weight: _by_rows(weight, call), W_DOWN)


def down_by_columns(call: Prepared, operands: Tensors) -> Scaled:
    """W_down ``[E, K, N]`` with a scale for each column, whose elements are contiguous."""
    values, scale = _kept(
        call, operands, "columns", lambda weight: quantise_transposed(weight, ready=call.ready), W_DOWN
    )
    return Scaled(values.mT, scale)


def up_and_gate_transposed(call: Prepared, operands: Tensors) -> Scaled:
    """The transposes of W_up and W_gate side by side, ``[E, K, 2 N]``, or of W_up alone."""

    def make(weight: Tensor, other: Tensor | None = None) -> Scaled:
        layout = call.extras["gate_and_up"]
        up, gate = (weight, other) if layout == "separate" else halves(weight, layout)
        return quantise_transposed(up, gate, call.ready)

    return _kept(call, operands, "columns", make, W_UP, W_GATE)


def _kept(call: Prepared, operands: Tensors, kind: str, make: Callable[..., _Made], *positions: int) -> _Made:
    """What ``make`` makes of the weights ``[E, out, in]`` at these positions, once while they do not change."""
    layout, transposed = call.extras["gate_and_up"], call.extras["transposed"]
    weights = [operands[position] for position in positions if operands[position] is not None]
    name = kind, positions, layout, transposed
    return from_weights(name, weights, call, lambda: make(*(each.mT if transposed else each for each in weights)))


def _by_rows(weight: Tensor, call: Prepared) -> Scaled:
    """Weights ``[E, out, in]`` of any strides."""
    if weight.stride(2) != 1:
        return quantise_transposed(weight.mT, ready=call.ready)
    values, scale = quantise_rows(weight.flatten(0, 1), ready=call.ready)
    return Scaled(values.view(weight.shape), scale.view(weight.shape[:2]))
