"""A mixture of experts in plain torch, in place of a feed-forward block: the control for `fusedlayers.FusedMoE`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.kernels.activations import ACTIVATIONS, canonical_activation


class Experts(nn.Module):
    """Runs each token ``[M, d_model]`` through its experts ``[M, k]`` and returns their weighted sum.

    The weights of all experts are stacked, and forward has the signature of transformers' experts: the three flags mark
    that interface for `fusedlayers.replace`, which then reads what the experts compute.
    """

    def __init__(self, d_model: int, d_ff: int, experts: int, activation: str, gated: bool) -> None:
        super().__init__()
        self.num_experts, self.activate = experts, ACTIVATIONS[canonical_activation(activation)].torch
        self.has_gate, self.has_bias, self.is_transposed = gated, False, False
        if gated:
            self.gate_up_proj = _drawn(experts, 2 * d_ff, d_model)
        else:
            self.up_proj = _drawn(experts, d_ff, d_model)
        self.down_proj = _drawn(experts, d_model, d_ff)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            x = hidden_states[token]
            if self.has_gate:
                gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, -1)
                hidden = self.activate(gate) * up
            else:
                hidden = self.activate(F.linear(x, self.up_proj[expert]))
            found = F.linear(hidden, self.down_proj[expert]) * top_k_weights[token, place, None]
            y = y.index_add(0, token, found.to(y.dtype))
        return y


class Mixture(nn.Module):
    """A router, and the experts that it chooses for each token of ``x [*B, M, d_model]``.

    Names and initial values of the parameters are those of :class:`fusedlayers.FusedMoE`, so checkpoints fit both.
    """

    def __init__(self, d_model: int, d_ff: int, experts: int, top_k: int, activation: str, gated: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(d_model, experts, bias=False)
        self.experts = Experts(d_model, d_ff, experts, activation, gated)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        logits = self.gate(rows)
        weights, index = logits.float().softmax(-1).topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
        return self.experts(rows, index, weights).view_as(x)


def _drawn(*shape: int) -> nn.Parameter:
    """The stacked weights, each initialised as by ``nn.Linear``."""
    bound = 1 / math.sqrt(shape[-1])
    return nn.Parameter(nn.init.uniform_(torch.empty(shape), -bound, bound))
