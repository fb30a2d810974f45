"""`FFNPieces`, an FFN as it stands in any module: its linear children and options, and its call."""

from __future__ import annotations

import weakref
from typing import Any, Literal, cast

from torch import Tensor, nn

from ..functional.ffn import FFN
from ..functional.last_call import LastCall
from .children import linear_weight, parameter, why_not_plain


class FFNPieces:
    """One FFN as it stands in a module: its linear children, and how the hidden is made from them.

    The linears are referred to weakly: blocks keep their pieces from call to call, and a child that is replaced must be
    freed at once, not at the next call.

    ``original`` is the activation as the module has it, where that is not ours, and ``output_dropout_p`` the
    probability of a dropout that the module applies to the result, which is no part of :meth:`run`.
    """

    __slots__ = ("_down", "_gate", "_last", "_up", "activation", "dropout_p", "original", "output_dropout_p")

    def __init__(
        self,
        up: nn.Module,
        down: nn.Module,
        gate: nn.Module | None,
        activation: str,
        dropout_p: float,
        original: object = None,
        output_dropout_p: float = 0.0,
    ) -> None:
        self._up, self._down = weakref.ref(up), weakref.ref(down)
        self._gate = None if gate is None else weakref.ref(gate)
        self.activation, self.dropout_p = activation, dropout_p
        self.original, self.output_dropout_p = original, output_dropout_p
        self._last = LastCall()

    @property
    def up(self) -> nn.Module:
        """The linear into the hidden."""
        return cast(nn.Module, self._up())

    @property
    def down(self) -> nn.Module:
        """The linear out of the hidden."""
        return cast(nn.Module, self._down())

    @property
    def gate(self) -> nn.Module | None:
        """The linear that is activated and multiplied in, or None."""
        return None if self._gate is None else self._gate()

    def linears(self) -> tuple[nn.Module, ...]:
        """The linear children."""
        gate = self.gate
        return (self.up, self.down) if gate is None else (self.up, gate, self.down)

    def with_dropout(self, p: float) -> FFNPieces:
        """The same FFN with this dropout of its hidden."""
        if p == self.dropout_p:
            return self
        return FFNPieces(self.up, self.down, self.gate, self.activation, p, self.original, self.output_dropout_p)

    def why_not_plain(self) -> str | None:
        """The first linear child that must be called, and why; None if all are plain."""
        for role, linear in (("up", self.up), ("gate", self.gate), ("down", self.down)):
            if linear is not None and (reason := why_not_plain(linear)):
                return f"the {role} linear {reason}"
        return None

    def arguments(
        self, x: Tensor, residual: Tensor | None = None, recompute: Literal["auto"] | bool | int = "auto"
    ) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` for input x; only for plain children."""
        up, down, gate = self.up, self.down, self.gate
        return {
            "x": x,
            "w_up": linear_weight(up),
            "w_down": linear_weight(down),
            "b_up": parameter(up, "bias"),
            "b_down": parameter(down, "bias"),
            "w_gate": None if gate is None else linear_weight(gate),
            "b_gate": None if gate is None else parameter(gate, "bias"),
            "activation": self.activation,
            "dropout_p": self.dropout_p,
            "recompute": recompute,
            "residual": residual,
        }

    def run(
        self, x: Tensor, residual: Tensor | None = None, recompute: Literal["auto"] | bool | int = "auto"
    ) -> Tensor:
        """``functional.ffn`` of x with the parameters that the children hold now; only for plain children."""
        w_up, b_up = _read(self._up())
        w_down, b_down = _read(self._down())
        w_gate, b_gate = (None, None) if self._gate is None else _read(self._gate())
        tensors = (x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, None)
        y: Tensor = FFN.repeat(self._last, tensors, (self.activation, self.dropout_p, recompute))
        return y


def _read(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The weight of a plain linear as ``linear_weight`` gives it, and the bias, in one step."""
    kept = linear._parameters
    if type(linear) is nn.Linear and "weight" in kept and "bias" in kept:
        return kept["weight"], kept["bias"]
    return linear_weight(linear), parameter(linear, "bias")
