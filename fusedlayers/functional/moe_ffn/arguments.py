"""Checks of the arguments of ``moe_ffn``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..operands import check_layout, check_shape, check_width, checked_flag, checked_number, said

# Layouts of gate and up projection: separate tensors, or merged, gate first.
LAYOUTS = ("separate", "concatenated", "interleaved")


def check_routing(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Checks the experts of every token and their weights, but not the values of the index."""
    for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_layout(name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{said(name, tensor)}: expected the device of x, {x.device}")
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{said('top_k_index', top_k_index)}: expected torch.int64 or torch.int32")
    if not top_k_weights.is_floating_point():
        raise TypeError(f"{said('top_k_weights', top_k_weights)}: expected a real floating-point dtype")
    if top_k_index.dim() != x.dim() or top_k_index.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"{said('top_k_index', top_k_index)}: expected [*B, M, k] as x is [*B, M, K] = {[*x.shape]}")
    check_shape("top_k_weights", top_k_weights, tuple(top_k_index.shape), "[*B, M, k]", "as top_k_index")


def check_experts(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    others: Sequence[Tensor | None],
    gate_and_up: str,
    transposed: bool,
) -> None:
    """Checks weights and biases of all experts in this layout; ``others``: w_gate, b_up, b_down, b_gate."""
    w_gate, b_up, b_down, b_gate = others
    merged = gate_and_up != "separate"
    if merged and (w_gate is not None or b_gate is not None):
        name = "b_gate" if w_gate is None else "w_gate"
        raise ValueError(f"{name} must be None with gate_and_up={gate_and_up!r}: w_up and b_up hold the gate, too")
    if b_gate is not None and w_gate is None:
        raise ValueError("b_gate must be None without w_gate")
    width = x.shape[-1]
    units = "2 N" if merged else "N"
    letters = f"[E, K, {units}]" if transposed else f"[E, {units}, K]"
    if w_up.dim() != 3:
        raise ValueError(f"{said('w_up', w_up)}: expected {letters}, three dimensions")
    check_width("x", x, "[*B, M, K]", "w_up", w_up, axis=-2 if transposed else -1)
    experts, rows = w_up.shape[0], w_up.shape[2 if transposed else 1]
    if merged and rows % 2:
        raise ValueError(f"{said('w_up', w_up)}: expected {letters}, gate and up, an even number")
    hidden = rows // 2 if merged else rows
    because = f"as w_up is {letters} = {[*w_up.shape]}"
    check_shape("w_gate", w_gate, tuple(w_up.shape), letters, because)
    down = (experts, hidden, width) if transposed else (experts, width, hidden)
    check_shape("w_down", w_down, down, "[E, N, K]" if transposed else "[E, K, N]", because)
    check_shape("b_up", b_up, (experts, rows), f"[E, {units}]", because)
    check_shape("b_gate", b_gate, (experts, hidden), "[E, N]", because)
    check_shape("b_down", b_down, (experts, width), "[E, K]", because)


def checked_options(
    gate_and_up: Any, transposed: Any, limit: Any, up_offset: Any, recompute: Any, gated: bool
) -> tuple[str, bool, float | None, float, bool]:
    """The checked options after the activation, numbers as floats."""
    if not isinstance(gate_and_up, str) or gate_and_up not in LAYOUTS:
        raise ValueError(f"gate_and_up must be one of {', '.join(LAYOUTS)}, got {gate_and_up!r}")
    for name, flag in (("transposed", transposed), ("recompute", recompute)):
        checked_flag(name, flag)
    gated = gated or gate_and_up != "separate"
    offset = checked_number("up_offset", up_offset, "a finite number")
    if limit is not None:
        limit = checked_number("limit", limit, "a positive number or None")
        if limit <= 0:
            raise ValueError(f"limit must be a positive number or None, got {limit!r}")
    if not gated and (limit is not None or offset):
        name = "up_offset" if limit is None else "limit"
        raise ValueError(f"{name} needs a gate: without w_gate there is nothing that it applies to")
    return gate_and_up, transposed, limit, offset, recompute
