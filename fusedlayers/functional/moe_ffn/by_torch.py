"""The experts in torch's own operations: rows sorted by expert, and products over each expert's rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ..operation import Tensors
from ..prepared import Prepared
from .grouped import grouped_product, product_in_loop, runs_in_loop


def experts_by_torch(call: Prepared, tensors: Tensors) -> Tensor:
    """As ``reference.moe_ffn``, for all experts at once; tensors as the public function takes them.

    With the slots s = (m, j) sorted by their expert e: ``y[m] = Σ_j top_k_weights[s] · ffn_e(x[m])``.
    """
    x, top_k_index, top_k_weights, w_up, w_down, w_gate, b_up, b_down, b_gate = tensors
    extras = call.extras
    if not extras["transposed"]:
        w_up, w_down, w_gate = w_up.mT, w_down.mT, None if w_gate is None else w_gate.mT
    tokens, flat_index, k = x.flatten(0, -2), top_k_index.flatten(), top_k_index.shape[-1]
    experts = w_up.shape[0]
    # Slots whose index is no expert are sorted to the end.
    is_expert = (flat_index >= 0) & (flat_index < experts)
    owners, slots = flat_index.where(is_expert, experts).sort(stable=True)
    ends = torch.searchsorted(owners, torch.arange(experts, device=x.device, dtype=owners.dtype), right=True)
    ends = ends.to(torch.int32)
    owned = (owners < experts).unsqueeze(-1)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return grouped_product(rows, weight, ends)
        if runs_in_loop(rows, weight):
            return product_in_loop(rows, weight, ends, bias)
        # The gradient of indexing accumulates row by row, so it needs float32. The last row is for what is no expert.
        wide = F.pad(bias.to(torch.promote_types(bias.dtype, torch.float32)), (0, 0, 0, 1))
        product = grouped_product(rows, weight, ends)
        # torch leaves rows after the last end uninitialised, and their gradients would reach the bias.
        return (product + wide[owners].to(product.dtype)).where(owned, 0)

    rows = tokens[slots // k].where(owned, 0)
    up, gate = reference.split_gate_and_up(linear(rows, w_up, b_up), extras["gate_and_up"])
    if w_gate is not None:
        gate = linear(rows, w_gate, b_gate)
    hidden = reference.clamped_hidden(
        up, gate, activation=call.problem.activation, limit=extras["limit"], up_offset=extras["up_offset"]
    )
    # The weight of an index that is no expert may be NaN, and 0 times NaN is not 0.
    scores = top_k_weights.flatten()[slots].unsqueeze(-1).where(owned, 0)
    weighted = linear(hidden, w_down, b_down).where(owned, 0) * scores
    sorted_position = slots.scatter(0, slots, torch.arange(slots.shape[0], device=x.device))
    y = weighted[sorted_position].view(tokens.shape[0], k, tokens.shape[1]).sum(1)
    return y.to(x.dtype).view(x.shape)
