"""What the FFN of a block keeps for its backward pass, for the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from .. import planning
from ..devices import describe
from ..functional.ffn.arguments import ffn_problem
from ..functional.switches import backend
from ..modules import FFNPieces, linear_weight

# A training batch: enough that the planner does not call it too small.
TOKENS = 65_536


def saved_bytes_per_token(pieces: FFNPieces, recompute: Literal["auto"] | bool | int) -> tuple[int, int]:
    """Bytes that torch, and that ``functional.ffn``, keep per token of a training batch, the input included."""
    weight = linear_weight(pieces.up)
    with torch.enable_grad():
        # One number in memory, whatever the size.
        x = weight.detach().new_empty(1, 1).expand(TOKENS, weight.shape[1]).requires_grad_()
        problem = ffn_problem(**pieces.arguments(x, recompute=recompute))
    device = describe(x.device)
    ours = planning.plan(problem, device, backend()).saved_bytes
    theirs = planning.plan(replace(problem, recompute="auto", saved_limit=None), device, "torch").saved_bytes
    return theirs // TOKENS, ours // TOKENS
