"""Operands of ``lora_ffn`` by name, and the checks of its adapters."""

from typing import Any, NamedTuple

from ..operands import describe_tensor
from ..shapes import check_absent


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


def check_adapters(given: Operands) -> None:
    """Checks that every adapter has both factors and a rank, and that only a gate has the gate's."""
    for name in ("up", "down", "gate"):
        a_name, b_name = f"{name}_a", f"{name}_b"
        a, b = getattr(given, a_name), getattr(given, b_name)
        if (a is None) != (b is None):
            missing, other = (a_name, b_name) if a is None else (b_name, a_name)
            raise ValueError(f"{missing} must be given with {other}: an adapter has both")
        if a is not None and not a.shape[0]:
            raise ValueError(f"{describe_tensor(a_name, a)}: expected a rank of at least 1")
    if given.w_gate is None:
        check_absent("b_gate", given.b_gate, "w_gate is None")
        check_absent("gate_a", given.gate_a, "w_gate is None")
