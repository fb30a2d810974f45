"""`FFNPieces`, an FFN as it stands in any module: its linear children and options, and its call."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from ..functional.ffn import FFN
from ..functional.operation import Operation
from ..functional.recalling import ModuleCalls
from .children import base_linear, linear_weight, parameter, split_gate, why_not_plain


class FFNPieces:
    """One FFN as it stands in a module: its linear children, and how the hidden is made from them.

    The linears are weak references: blocks keep their pieces from call to call, and a child that is replaced must be
    freed at once, not at the next call. A block reuses them while :func:`.guarding.kept` returns them.

    ``original`` is the activation as the module has it, where that is not ours, and ``output_dropout_p`` the
    probability of a dropout that the module applies to the result, which is no part of :meth:`run`. Where one linear
    holds gate and up projection it is ``up``, and ``gate_rows`` tells which of its rows are the gate's.
    """

    # Positions of x, the residual and the seed among the tensors of the operation.
    _INPUTS: ClassVar[tuple[int, ...]] = (0, 7, 8)
    __slots__ = (
        "_down", "_gate", "_up", "activation", "calls", "dropout_p", "gate_rows", "original",
        "output_dropout_p",
    )  # fmt: skip

    def __init__(
        self,
        up: nn.Module,
        down: nn.Module,
        gate: nn.Module | None,
        activation: str,
        dropout_p: float,
        original: object = None,
        output_dropout_p: float = 0.0,
        gate_rows: str | None = None,
    ) -> None:
        self._up, self._down = weakref.ref(up), weakref.ref(down)
        self._gate = None if gate is None else weakref.ref(gate)
        self.activation, self.dropout_p = activation, dropout_p
        self.original, self.output_dropout_p, self.gate_rows = original, output_dropout_p, gate_rows
        self.calls = ModuleCalls(self._INPUTS)

    @property
    def operation(self) -> Operation:
        """What computes the FFN."""
        return FFN

    @property
    def adapter_dropout_p(self) -> float:
        """The dropout probability of the input of adapters."""
        return 0.0

    @property
    def may_be_kept(self) -> bool:
        """Whether blocks may keep the pieces from call to call."""
        return True

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
        """The linear of the gate alone, or None."""
        return None if self._gate is None else self._gate()

    def linears(self) -> tuple[nn.Module, ...]:
        """The linear children."""
        gate = self.gate
        return (self.up, self.down) if gate is None else (self.up, gate, self.down)

    def why_not_plain(self) -> str | None:
        """The first linear child that must be called, and why; None if all are plain."""
        for role, linear in (("up", self.up), ("gate", self.gate), ("down", self.down)):
            if linear is not None and (reason := why_not_plain(linear)):
                return f"the {role} linear {reason}"
        return None

    def arguments(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        recompute: Literal["auto"] | bool | int = "auto",
        precision: str | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` for input x; only for plain children."""
        tensors = zip(FFN.tensor_names, self.tensors(x, residual), strict=True)
        given = {name: tensor for name, tensor in tensors if name != "dropout_seed"}
        options = {"activation": self.activation, "dropout_p": self.dropout_p, "recompute": recompute}
        return given | options | {"precision": precision}

    def run(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        recompute: Literal["auto"] | bool | int = "auto",
        precision: str | None = None,
    ) -> Tensor | None:
        """``functional.ffn`` of x with the parameters that the children hold now; only for plain children.

        None where a child is no longer plain, and where one linear holds gate and up projection and torch would run the
        FFN: the module's own code takes one product instead of two. But with a dropout ``functional.ffn`` runs on any
        path, so that its mask is the same.
        """
        options = (self.activation, self.dropout_p, recompute, precision)
        in_kernels = self.gate_rows is not None and not self.dropout_p
        return self._run(FFN, self.tensors(x, residual), options, in_kernels)

    def _run(self, operation: Operation, tensors: tuple[Any, ...], options: tuple[Any, ...], in_kernels: bool) -> Any:
        """The call of ``operation``, recalled if possible; ``in_kernels``: None where torch would run it."""
        call = self.calls.recall(tensors, options)
        if call is not None:
            return None if in_kernels and call.runs_eager else call.operation.run(call, tensors)
        # Other shapes, or something else in place of the parameters.
        if self.why_not_plain() is not None:
            return None
        return operation.call(tensors, options, in_kernels=in_kernels, module_calls=self.calls)

    def run_instead(
        self, x: Tensor, recompute: Literal["auto"] | bool | int, precision: str | None = None
    ) -> Tensor | None:
        """:meth:`run` instead of a user's module's own code, which must run where this gives None.

        None also for x of another width or dtype, for which that code may do something else, or raise its own error.
        """
        try:
            return self.run(x, None, recompute, precision)
        except (TypeError, ValueError):
            weight = linear_weight(base_linear(self.up))
            if not isinstance(x, Tensor) or (x.shape[-1:] == weight.shape[1:] and x.dtype is weight.dtype):
                raise
            return None

    def tensors(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        """The tensors of ``functional.ffn``."""
        read: list[Any] = []
        for reference in (self._up, self._down, self._gate):
            linear: Any = None if reference is None else reference()
            if type(linear) is nn.Linear and "weight" in (kept := linear._parameters) and "bias" in kept:
                read += kept["weight"], kept["bias"]
            elif linear is None:
                read += None, None
            else:
                read += linear_weight(linear), parameter(linear, "bias")
        w_up, b_up, w_down, b_down, w_gate, b_gate = read
        if self.gate_rows is not None and w_up.dim() == 2:
            w_gate, w_up = split_gate(w_up, self.gate_rows)
            b_gate, b_up = (None, None) if b_up is None else split_gate(b_up, self.gate_rows)
        return x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, None
