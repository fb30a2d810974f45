"""Checks of the arguments of ``moe_ffn``."""

import functools
from typing import Any

from torch import Tensor

from ..options import checked_choice, checked_flag, checked_number
from ..shapes import Shapes, check_absent

# Layouts of gate and up projection: separate tensors, or merged, gate first.
LAYOUTS = ("separate", "concatenated", "interleaved")


@functools.cache
def expert_shapes(gate_and_up: str, transposed: bool) -> Shapes:
    """The tensors of a call with experts of this layout."""
    merged = "N" if gate_and_up == "separate" else "2N"
    w_up, w_gate, w_down = f"E {merged} K", "E N K", "E K N"
    if transposed:
        w_up, w_gate, w_down = f"E K {merged}", "E K N", "E N K"
    return Shapes(
        f"x: *B M K, top_k_index: index(*B M k), top_k_weights: float(*B M k), w_up: {w_up}, w_down: {w_down}, "
        f"w_gate?: {w_gate}, b_up?: E {merged}, b_down?: E K, b_gate?: E N"
    )


def check_gate(gate_and_up: str, w_gate: Tensor | None, b_gate: Tensor | None) -> None:
    """Checks that the gate is given once, and its bias only with it."""
    if gate_and_up != "separate":
        because = f"gate_and_up={gate_and_up!r}: w_up and b_up hold the gate, too"
        check_absent("w_gate", w_gate, because)
        check_absent("b_gate", b_gate, because)
    elif w_gate is None:
        check_absent("b_gate", b_gate, "w_gate is None")


def checked_options(
    gate_and_up: Any, transposed: Any, limit: Any, up_offset: Any, recompute: Any, gated: bool
) -> tuple[str, bool, float | None, float, bool]:
    """The checked options after the activation, numbers as floats."""
    checked_choice("gate_and_up", gate_and_up, LAYOUTS)
    checked_flag("transposed", transposed)
    checked_flag("recompute", recompute)
    gated = gated or gate_and_up != "separate"
    offset = checked_number("up_offset", up_offset, "a finite number")
    if limit is not None:
        limit = checked_number("limit", limit, "a positive number or None", lambda number: number > 0)
    if not gated and (limit is not None or offset):
        name = "up_offset" if limit is None else "limit"
        raise ValueError(f"{name} needs a gate: without w_gate there is nothing that it applies to")
    return gate_and_up, transposed, limit, offset, recompute
