"""The narrow products of adapters, and the dropout of their inputs."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.dropout import NO_DROPOUT, Dropout, drop
from ...kernels.gemm_epilogue import LowRank, aligned_columns
from .arguments import Operands


class Product(NamedTuple):
    """``scale · dropout(x) Aᵀ``, or no product where x or A is None."""

    x: Tensor | None
    a: Tensor | None
    scale: float
    dropout: Dropout = NO_DROPOUT


def side_by_side(*products: Product) -> Any:
    """The existing products side by side, each at an offset that TMA can load from, with zeros between them.

    None if there is none.
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
        # Gate and up projection may share a mask; otherwise free the last dropped x first.
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
    """The factor, zero-padded along its rank as the products of :func:`side_by_side` are."""
    rank = factor.shape[axis]
    behind = aligned_columns(factor, rank) - rank
    return factor if not behind else F.pad(factor, (0, behind) if axis else (0, 0, 0, behind))


def into_hidden(given: Operands, inner: Tensor | None) -> LowRank | None:
    """What is added to the pre-activations; a projection of a gated FFN without an adapter gets a B of zeros."""
    if inner is None:
        return None
    up, gate = given.up_b, given.gate_b
    first = 0 if up is None or gate is None else aligned_columns(inner, up.shape[1])
    if given.w_gate is not None:
        up, gate = (torch.zeros_like(gate) if up is None else up), (torch.zeros_like(up) if gate is None else gate)
    assert up is not None
    return LowRank(inner, up, gate, first)
