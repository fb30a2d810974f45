"""The narrow products of adapters, and the dropout of what they take."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.dropout import NO_DROPOUT, Dropout, drop
from ...kernels.gemm_epilogue import LowRank, aligned_columns
from .arguments import Operands


class Product(NamedTuple):
    """``scale · dropout(x) Aᵀ``; x or A may be None, and then there is none."""

    x: Tensor | None
    a: Tensor | None
    scale: float
    dropout: Dropout = NO_DROPOUT


def side_by_side(*products: Product) -> Any:
    """The products that there are, side by side, each where TMA can copy it by itself.

    What lies between them is zeros; None if there is none.
    """
    there = [(x, a, scale, dropout) for x, a, scale, dropout in products if x is not None and a is not None]
    if not there:
        return None
    x = there[0][0]
    found = x.new_empty(x.shape[0], sum(aligned_columns(x, a.shape[0]) for _, a, _, _ in there))
    first = 0
    taken: dict[tuple[int, tuple[int, int]], Tensor] = {}
    for x, a, scale, dropout in there:
        rank, end = a.shape[0], first + aligned_columns(x, a.shape[0])
        part = found[:, first : first + rank]
        # Gate and up projection may share a mask; what is not needed again goes first.
        if (same := (id(x), dropout.place)) not in taken:
            taken.clear()
            taken[same] = dropped(x, dropout)
        torch.addmm(part, taken[same], a.t(), beta=0, alpha=scale, out=part)
        if first + rank < end:
            found[:, first + rank : end] = 0
        first = end
    return found


def dropped(values: Tensor, dropout: Dropout, out: Tensor | None = None) -> Tensor:
    """``values`` after the dropout, which may be none; ``out`` as in ``kernels.dropout.drop``."""
    if dropout.seed is None:
        return values
    return drop(values, dropout.seed, dropout.p, dropout.place[0], out)


def aligned(factor: Tensor, axis: int) -> Tensor:
    """The factor, with zeros behind its ranks where the products with x have zeros."""
    rank = factor.shape[axis]
    behind = aligned_columns(factor, rank) - rank
    return factor if not behind else F.pad(factor, (0, behind) if axis else (0, 0, 0, behind))


def into_hidden(given: Operands, inner: Tensor | None) -> LowRank | None:
    """What joins the pre-activations; the projection of a gated FFN that has no adapter gets one of zeros."""
    if inner is None:
        return None
    up, gate = given.up_b, given.gate_b
    first = 0 if up is None or gate is None else aligned_columns(inner, up.shape[1])
    if given.w_gate is not None:
        up, gate = (torch.zeros_like(gate) if up is None else up), (torch.zeros_like(up) if gate is None else gate)
    assert up is not None
    return LowRank(inner, up, gate, first)
