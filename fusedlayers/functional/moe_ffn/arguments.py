"""Checks of the arguments of ``moe_ffn``, and its planning problem."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...planning.moe_ffn import MoeProblem
from ..call import call_facts, wants_gradient
from ..operands import check_given, check_layout, check_shape, check_tensors, said

# How the projections of gate and up lie: each in a tensor of its own, or merged, gate first.
LAYOUTS = ("separate", "concatenated", "interleaved")


def check_routing(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """The experts of every token and their weights; which experts they are is not looked at."""
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
    """Weights and biases of all experts, in the layout that is named; ``others``: w_gate, b_up, b_down, b_gate."""
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
    if w_up.dim() != 3 or w_up.shape[1 if transposed else 2] != width:
        turned = w_up.dim() == 3 and w_up.shape[2 if transposed else 1] == width
        hint = f" (it looks as with transposed={not transposed})" if turned else ""
        raise ValueError(
            f"{said('w_up', w_up)}: expected {letters} with K = {width}, the last dimension of x {[*x.shape]}{hint}"
        )
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


def check_moe_tensors(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    b_gate: Tensor | None,
) -> None:
    """Types, dtypes, devices and the routing's shapes."""
    check_given(x=x, top_k_index=top_k_index, top_k_weights=top_k_weights, w_up=w_up, w_down=w_down)
    check_tensors(
        {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "b_up": b_up, "b_down": b_down, "b_gate": b_gate}
    )
    if x.dim() < 2:
        raise ValueError(f"{said('x', x)}: expected [*B, M, K], at least two dimensions")
    check_routing(x, top_k_index, top_k_weights)


def checked_options(
    gate_and_up: Any, transposed: Any, limit: Any, up_offset: Any, recompute: Any, gated: bool
) -> tuple[str, bool, float | None, float, bool]:
    """The options behind the activation, numbers as floats."""
    if not isinstance(gate_and_up, str) or gate_and_up not in LAYOUTS:
        raise ValueError(f"gate_and_up must be one of {', '.join(LAYOUTS)}, got {gate_and_up!r}")
    for name, flag in (("transposed", transposed), ("recompute", recompute)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r} ({type(flag).__name__})")
    gated = gated or gate_and_up != "separate"
    offset = _number("up_offset", up_offset, "a finite number")
    if limit is not None:
        limit = _number("limit", limit, "a positive number or None")
        if limit <= 0:
            raise ValueError(f"limit must be a positive number or None, got {limit!r}")
    if not gated and (limit is not None or offset):
        name = "up_offset" if limit is None else "limit"
        raise ValueError(f"{name} needs a gate: without w_gate there is nothing that it applies to")
    return gate_and_up, transposed, limit, offset, recompute


def _number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)


def moe_problem(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *others: Tensor | None,
    activation: str,
    gate_and_up: str,
    transposed: bool,
    clamped: bool,
    recompute: bool,
) -> MoeProblem:
    """The planning problem of one call, its leading dims flattened into the tokens."""
    w_gate, b_up, b_down, _ = others
    return MoeProblem(
        M=math.prod(x.shape[:-1]),
        K=x.shape[-1],
        N=w_down.shape[1 if transposed else 2],
        E=w_up.shape[0],
        top_k=top_k_index.shape[-1],
        activation=activation,
        gated=w_gate is not None or gate_and_up != "separate",
        biased=b_up is not None or b_down is not None,
        clamped=clamped,
        recompute=recompute,
        training=wants_gradient(x, top_k_weights, w_up, w_down, *others),
        **call_facts(x, top_k_index, top_k_weights, w_up, w_down, *others),
    )
