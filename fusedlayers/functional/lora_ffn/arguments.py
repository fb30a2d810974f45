"""Operands of ``lora_ffn`` by name."""

from typing import Any, NamedTuple


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
