"""What the FFN of a block keeps for its backward pass, for the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .. import planning
from ..devices import describe
from ..functional.ffn.arguments import ffn_problem
from ..functional.switches import backend
from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..modules import FFNPieces, linear_weight
from ..planning.costs import SAVED_FOR_SLOPE, keeps_mask

# A training batch: enough that the planner does not call it too small.
TOKENS = 65_536


def saved_bytes_per_token(pieces: FFNPieces, recompute: Literal["auto"] | bool | int) -> tuple[int, int]:
    """Bytes that the block by torch, and with ``functional.ffn``, keeps per token of a training batch.

    Of the FFN with its input, and of the dropout of its result, which torch applies in both.
    """
    up, down = linear_weight(pieces.up), linear_weight(pieces.down)
    with torch.enable_grad():
        # One number in memory, whatever the size.
        x = up.detach().new_empty(1, 1).expand(TOKENS, up.shape[1]).requires_grad_()
        problem = ffn_problem(**pieces.arguments(x, recompute=recompute))
    device = describe(x.device)
    ours = planning.plan(problem, device, backend()).saved_bytes // TOKENS
    theirs = planning.plan(replace(problem, recompute="auto", saved_limit=None), device, "torch").saved_bytes // TOKENS
    # torch's dropout keeps booleans on a GPU, elsewhere numbers of the hidden's dtype.
    mask = 1 if device.kind == "cuda" else problem.element_bytes
    if problem.training:
        beyond = _kept_for_slope(pieces.original) - SAVED_FOR_SLOPE.get(pieces.activation, 0)
        theirs += beyond * problem.element_bytes * problem.N
        if problem.dropout:
            theirs += (mask - problem.element_bytes * keeps_mask(problem, device)) * problem.N
    result = mask * down.shape[0] if pieces.output_dropout_p and problem.training else 0
    return theirs + result, ours + result


def _kept_for_slope(activation: object) -> int:
    """Tensors of its input's size that an activation keeps beside its value, counted: some are written in Python."""
    run = ACTIVATIONS[canonical_activation(activation)].torch if isinstance(activation, str) else activation
    assert callable(run)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Not a leaf, which an activation must not change in place.
        value = run(torch.zeros(64, requires_grad=True, device="cpu") + 0)
    kept.pop(value.untyped_storage().data_ptr(), None)
    return sum(tensor.numel() == value.numel() for tensor in kept.values())
