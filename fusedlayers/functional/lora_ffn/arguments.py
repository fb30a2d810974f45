"""Operands of ``lora_ffn`` by name, and the checks of its adapters."""

from typing import Any, NamedTuple

from torch import Tensor

from ..operands import check_shape, said


class Operands(NamedTuple):
    """The operands, or their gradients, by name."""

    x: Any = None
    w_up: Any = None
    w_down: Any = None
    b_up: Any = None
    b_down: Any = None
    w_gate: Any = None
    b_gate: Any = None
    up_a: Any = None
    up_b: Any = None
    down_a: Any = None
    down_b: Any = None
    gate_a: Any = None
    gate_b: Any = None
    seed: Any = None


def check_adapter(name: str, a: Tensor | None, b: Tensor | None, inner: int, outer: int) -> None:
    """Checks both factors of one adapter, or none, of a linear layer with ``inner`` inputs and ``outer`` outputs."""
    given, missing = (f"{name}_a", f"{name}_b") if b is None else (f"{name}_b", f"{name}_a")
    if (a is None) != (b is None):
        raise ValueError(f"{missing} must be given with {given}: an adapter has both")
    if a is None or b is None:
        return
    if a.dim() != 2 or not a.shape[0]:
        raise ValueError(f"{said(f'{name}_a', a)}: expected [R, {inner}], of rank R >= 1")
    rank = a.shape[0]
    check_shape(f"{name}_a", a, (rank, inner), "[R, in]", f"as w_{name} has {inner} columns")
    check_shape(f"{name}_b", b, (outer, rank), "[out, R]", f"as w_{name} has {outer} rows, and {name}_a {rank}")
