"""The feed-forward blocks of a mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import hidden


def moe_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_and_up: str = "separate",
    transposed: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """``Σ_j top_k_weights[m, j] · ffn_e(x[m])`` with ``e = top_k_index[m, j]``: a loop over experts; any dtype.

    x ``[*B, M, K]``, top_k_index and top_k_weights ``[*B, M, k]``, w_* ``[E, out, in]`` in the layout that
    ``gate_and_up`` and ``transposed`` name. An index that names no expert adds nothing.
    """
    if transposed:
        w_up, w_down, w_gate = w_up.mT, w_down.mT, None if w_gate is None else w_gate.mT
    tokens, index, weights = (each.flatten(0, -2) for each in (x, top_k_index, top_k_weights))
    y = torch.zeros_like(tokens, dtype=torch.promote_types(x.dtype, top_k_weights.dtype))
    for expert in range(w_up.shape[0]):
        token, choice = torch.where(index == expert)
        b_up_one, b_down_one = (None if bias is None else bias[expert] for bias in (b_up, b_down))
        up, gate = split_gate_and_up(F.linear(tokens[token], w_up[expert], b_up_one), gate_and_up)
        if w_gate is not None:
            gate = F.linear(tokens[token], w_gate[expert], None if b_gate is None else b_gate[expert])
        h = clamped_hidden(up, gate, activation=activation, limit=limit, up_offset=up_offset)
        result = F.linear(h, w_down[expert], b_down_one)
        y = y.index_add(0, token, result * weights[token, choice].unsqueeze(-1))
    return y.to(x.dtype).reshape(x.shape)


def split_gate_and_up(merged: Tensor, gate_and_up: str) -> tuple[Tensor, Tensor | None]:
    """(up, gate) from the last dimension of ``merged``; if they are ``"separate"``, (merged, None)."""
    if gate_and_up == "separate":
        return merged, None
    gate, up = (merged[..., ::2], merged[..., 1::2]) if gate_and_up == "interleaved" else merged.chunk(2, -1)
    return up, gate


def clamped_hidden(
    up: Tensor, gate: Tensor | None, *, activation: str, limit: float | None = None, up_offset: float = 0.0
) -> Tensor:
    """``act(min(gate, limit)) ⊙ (clamp(up, -limit, limit) + up_offset)``; without a gate ``act(up)``."""
    if limit is not None and gate is not None:
        up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
    return hidden(up + up_offset if up_offset else up, gate, activation=activation)
