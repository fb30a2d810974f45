"""FFNs whose linears carry adapters of low rank: peft's ``lora.Linear`` is read through, as plain linears are.

peft computes ``base(x) + scaling · B(A(dropout(x)))`` in the call of a module that wraps the linear. While that is all
that its call does, the FFN runs through ``functional.lora_ffn``, with the parameters where peft keeps them. Any other
adapter (DoRA and other variants, several at once) is called.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..functional.ffn import FFN
from ..functional.lora_ffn import LORA_FFN
from ..functional.operands import autocast_dtype
from ..functional.operation import Operation
from .children import (
    active_adapter,
    base_linear,
    is_adapted,
    linear_weight,
    parameter,
    split_gate,
    why_not_plain,
    why_not_read_past,
)
from .pieces import FFNPieces

_IDENTITIES = (nn.Identity, nn.Dropout)


class _Adapted(NamedTuple):
    """A linear as it computes now: ``x Wᵀ + bias + scale (x Aᵀ) Bᵀ``, or without an adapter ``x Wᵀ + bias``."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


_NO_LINEAR = _Adapted(None, None)  # type: ignore[arg-type]  # there is no gate


class AdaptedFFNPieces(FFNPieces):
    """An FFN some of whose linears are wrapped by peft's adapters, in their current state."""

    _INPUTS = (0,)
    __slots__ = ("_adapters", "_base", "_dropouts")

    def __init__(self, up: nn.Module, down: nn.Module, gate: nn.Module | None, *rest: Any) -> None:
        super().__init__(up, down, gate, *rest)
        self._adapters = tuple(None if each is None else active_adapter(each) for each in (up, down, gate))
        named = zip((up, down, gate), self._adapters, strict=True)
        self._dropouts = sorted({_dropout_p(linear, name) for linear, name in named if name is not None})
        self._base: FFNPieces | None = None
        if not any(self._adapters):
            self._base = FFNPieces(
                base_linear(up), base_linear(down), None if gate is None else base_linear(gate), *rest
            )  # fmt: skip

    @property
    def operation(self) -> Operation:
        """The FFN with adapters; without, where all are merged or disabled."""
        return LORA_FFN if self._base is None else FFN

    @property
    def adapter_dropout_p(self) -> float:
        return self._dropouts[0] if self._dropouts else 0.0

    @property
    def may_be_kept(self) -> bool:
        """Whether all adapters are active, and all dtypes equal, so that autocast does not matter."""
        linears = [linear for linear in self.linears() if is_adapted(linear)]
        dtypes = {cast(Tensor, parameter(each, "weight")).dtype for each in self.read_linears()}
        return all(active_adapter(linear) for linear in linears) and len(dtypes) == 1

    def read_linears(self) -> tuple[nn.Module, ...]:
        """The linears that are wrapped, and those of their adapters."""
        found: list[nn.Module] = []
        for linear in self.linears():
            found.append(base_linear(linear))
            if (name := active_adapter(linear)) is not None:
                wrapper: Any = linear
                found += [wrapper.lora_A[name], wrapper.lora_B[name]]
        return tuple(found)

    def why_not_plain(self) -> str | None:
        if self.dropout_p and self._base is None:
            return "its hidden has a dropout, which is not fused with adapters"
        for role, linear in (("up", self.up), ("gate", self.gate), ("down", self.down)):
            if linear is not None and (reason := _why_not_read(linear)):
                return f"the {role} linear {reason}"
        if len(self._dropouts) > 1:
            return f"its adapters have dropouts of several probabilities: {', '.join(map(str, self._dropouts))}"
        return None

    def arguments(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        recompute: Literal["auto"] | bool | int = "auto",
        precision: str | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``functional.lora_ffn``, which has no residual or ``recompute``."""
        if self._base is not None:
            return self._base.arguments(x, residual, recompute, precision)
        tensors, options = self._given(x, precision)
        names = (*LORA_FFN.tensor_names, *LORA_FFN.option_names)
        return dict(zip(names, (*tensors, *options), strict=True))

    def run(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        recompute: Literal["auto"] | bool | int = "auto",
        precision: str | None = None,
    ) -> Tensor | None:
        """``functional.lora_ffn`` of x; None as for any FFN, and where the hidden has a dropout.

        The adapters' dropout, too, is drawn by the function on any path.
        """
        if self._base is not None:
            return self._base.run(x, residual, recompute, precision)
        if self.dropout_p:
            return None
        in_kernels = self.gate_rows is not None and not self.adapter_dropout_p
        tensors, options = self._given(x, precision)
        y: Tensor | None = self._run(LORA_FFN, tensors, options, in_kernels)
        return y if y is None or residual is None else y + residual

    def _given(self, x: Tensor, precision: str | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Tensors and options of ``functional.lora_ffn``, in its order."""
        up, down = _read(self._up(), self._adapters[0]), _read(self._down(), self._adapters[1])
        gate = _NO_LINEAR if self._gate is None else _read(self._gate(), self._adapters[2])
        if self.gate_rows is not None:
            gate, up = _halves(up, self.gate_rows)
        tensors = (
            x, up.weight, down.weight, up.bias, down.bias, gate.weight, gate.bias, up.a, up.b, down.a, down.b, gate.a,
            gate.b,
        )  # fmt: skip
        # The one adapter of a linear that holds gate and up projection drops x once.
        dropout = self.adapter_dropout_p, self.gate_rows is not None
        return (*tensors, None), (self.activation, up.scale, down.scale, gate.scale, *dropout, precision)


def ffn_pieces(up: nn.Module, down: nn.Module, gate: nn.Module | None, *rest: Any) -> FFNPieces:
    """The pieces of an FFN, with adapters or without; ``rest`` as :class:`FFNPieces` takes it."""
    adapted = any(linear is not None and is_adapted(linear) for linear in (up, down, gate))
    return (AdaptedFFNPieces if adapted else FFNPieces)(up, down, gate, *rest)


def _why_not_read(linear: Any) -> str | None:
    """Why a linear, wrapped or not, must be called, or None."""
    if not is_adapted(linear):
        return why_not_plain(linear)
    if reason := why_not_read_past(linear) or why_not_plain(base_linear(linear)):
        return reason
    if linear.disable_adapters and linear.merged:
        return "has a merged adapter that is to be disabled"
    if (name := active_adapter(linear)) is None:
        return None
    if sum(each in linear.lora_A for each in linear.active_adapters) > 1:
        return "has several active adapters"
    if name in linear.lora_variant:
        return f"has an adapter of another kind: {type(linear.lora_variant[name]).__name__}"
    a, b, dropout = linear.lora_A[name], linear.lora_B[name], linear.lora_dropout[name]
    for part, module in (("A", a), ("B", b)):
        if reason := why_not_plain(module):
            return f"has an adapter whose {part} {reason}"
    if type(dropout) not in _IDENTITIES or why_not_read_past(dropout) or getattr(dropout, "inplace", False):
        return "has a dropout of its adapter that must be called"
    if not 0 <= (p := _dropout_p(linear, name)) < 1:
        return f"has an adapter with a dropout of p={p}, outside [0, 1)"
    weight = linear_weight(linear)
    if weight.device != a.weight.device or weight.device != b.weight.device:
        return f"has an adapter on {a.weight.device}, but a weight on {weight.device}"
    alike = weight.dtype == a.weight.dtype == b.weight.dtype
    # Autocast leaves float64 alone.
    double = torch.float64 in (weight.dtype, a.weight.dtype)
    if not alike and (double or autocast_dtype(weight.device) is None):
        where = "" if double else ": that is fused under autocast alone"
        where += ", which the meta device has not" if where and weight.is_meta else ""
        return f"has an adapter of {a.weight.dtype}, but a weight of {weight.dtype}{where}"
    return None


def _dropout_p(linear: Any, name: str) -> float:
    """The current dropout probability of the input of this adapter."""
    dropout = linear.lora_dropout[name]
    return float(dropout.p) if type(dropout) is nn.Dropout and dropout.training else 0.0


def _read(linear: Any, name: str | None) -> _Adapted:
    """A linear that may be read, with the adapter of this name."""
    base = base_linear(linear)
    weight, bias = linear_weight(base), parameter(base, "bias")
    if name is None:
        return _Adapted(weight, bias)
    parts = linear._modules
    a, b = parts["lora_A"]._modules[name]._parameters["weight"], parts["lora_B"]._modules[name]._parameters
    scale = linear.scaling[name]
    if b["bias"] is not None:
        added = b["bias"] * scale
        bias = added if bias is None else bias + added
    return _Adapted(weight, bias, a, b["weight"], scale)


def _halves(merged: _Adapted, gate_rows: str) -> list[_Adapted]:
    """The gate and the up projection of a linear that holds both: their adapters have one A."""
    weight, bias, a, b, scale = merged
    halves = [(None, None) if each is None else split_gate(each, gate_rows) for each in (weight, bias, b)]
    return [
        _Adapted(cast(Tensor, half_weight), half_bias, a, half_b, scale)
        for half_weight, half_bias, half_b in zip(*halves, strict=True)
    ]
