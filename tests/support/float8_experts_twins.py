"""Experts in 8 bits on a CPU: the float32 model in the place of the launchers of ``grouped_gemm``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.float8 import Scaled
from fusedlayers.kernels.grouped_gemm import HiddenGradients
from fusedlayers.reference import float8 as reference


def of_experts(function: Any, rows: Any, by_row: Iterable[Any], by_expert: Iterable[Any]) -> Any:
    """The results of ``function`` of each expert's rows and weights, zeros behind the rows in use; None stays None."""
    bounds, found = list(pairwise(rows.starts.tolist())), []
    for expert, (first, end) in enumerate(bounds):
        own = (_part(each, slice(first, end)) for each in by_row)
        found.append(function(*own, *(_part(each, expert) for each in by_expert)))
    results = []
    for parts in zip(*found, strict=True):
        whole = None
        if parts[0] is not None:
            whole = parts[0].new_zeros(rows.capacity, *parts[0].shape[1:])
            whole[: bounds[-1][1]] = torch.cat(parts)
        results.append(whole)
    return results


def _part(each: Any, which: Any) -> Any:
    if isinstance(each, Scaled):
        return Scaled(each.values[which], each.scale[which])
    return None if each is None else each[which]


def hidden(
    x: Scaled, w_up: Scaled, w_gate: Any, b_up: Any, b_gate: Any, rows: Any, keep: bool, arithmetic: Any, *,
    dtype: torch.dtype, **_: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """As the launcher of that name."""

    def hidden(x: Scaled, up: Scaled, b_up: Any, gate: Any, b_gate: Any) -> Any:
        _, z, g = reference.scaled_hidden(x, up, b_up, gate, b_gate, activation="identity")
        return _limited(z, g, arithmetic), z, g

    h, *z = of_experts(hidden, rows, [x], [w_up, b_up, w_gate, b_gate])
    kept = [each if each is None or not keep else each.to(dtype) for each in z] if keep else [None, None]
    return h.to(dtype), *kept


def _limited(z: Tensor, g: Tensor | None, arithmetic: Any) -> Tensor:
    act = ACTIVATIONS[arithmetic.activation].torch
    if g is None:
        return act(z)
    limit = arithmetic.limit
    if limit is not None:
        z, g = z.clamp(-limit, limit), g.clamp(max=limit)
    return act(g) * (z + arithmetic.offset)


def hidden_gradient(
    dy: Scaled, w_down: Scaled, z: Tensor, g: Tensor | None, row_weights: Tensor, rows: Any, keep_hidden: bool,
    want_weights: bool, arithmetic: Any, **_: Any,
) -> HiddenGradients:  # fmt: skip
    """As the launcher of that name."""

    def gradients(dy: Scaled, z: Tensor, g: Tensor | None, weights: Tensor, down: Scaled) -> Any:
        z, g, by_row = z.float(), None if g is None else g.float(), weights[:, None]
        h, act = _limited(z, g, arithmetic), ACTIVATIONS[arithmetic.activation]
        d_hidden = reference.scaled_product(dy, Scaled(down.values.mT, down.scale))
        weighted, sums, d_hidden = h * by_row, (d_hidden * h).sum(1), d_hidden * by_row
        if g is None:
            return act.gradient(d_hidden, z), None, weighted, sums
        limit = float("inf") if arithmetic.limit is None else arithmetic.limit
        up, gate = z.clamp(-limit, limit) + arithmetic.offset, g.clamp(max=limit)
        dz = (d_hidden * act.torch(gate)).where(z.abs() <= limit, 0)
        return dz, act.gradient(d_hidden * up, gate).where(g <= limit, 0), weighted, sums

    dz, dg, weighted, sums = of_experts(gradients, rows, [dy, z, g, row_weights], [w_down])
    partials = sums[None] if want_weights else None
    dz, dg, weighted = (None if each is None else each.to(z.dtype) for each in (dz, dg, weighted))
    return HiddenGradients(dz, dg, weighted if keep_hidden else None, partials)


def product(pairs: Any, bias: Any, rows: Any, *_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
    """As the launcher of that name, of one pair."""
    [(a, w)] = pairs

    def product(a: Scaled, w: Scaled, bias: Any) -> Any:
        y = reference.scaled_product(a, w)
        return (y if bias is None else y + bias,)

    [found] = of_experts(product, rows, [a], [w, bias])
    return found.to(dtype)


def weight_gradient(a: Tensor, b: Tensor, rows: Any, out: Tensor, *_: Any, **__: Any) -> None:
    """As the launcher of that name."""
    bounds = pairwise(rows.starts.tolist())
    for each, (first, end) in zip(out, bounds, strict=True):
        each.copy_(a[first:end].float().T @ b[first:end].float())


def transposed_pair(left: Scaled, right: Tensor, right_scale: Tensor, starts: Tensor) -> tuple[Scaled, Scaled]:
    """As the launcher of that name, of each expert's rows."""
    a = left.values.new_zeros(left.values.shape[1], len(left.values))
    b = left.values.new_zeros(right.shape[1], len(right))
    scale = torch.zeros(len(starts) - 1, device=right.device)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        own = slice(first, end)
        if first < end:
            pair = reference.transposed_pair((left.values[own], left.scale[own]), right[own], right_scale[own])
            (a[:, own], scale[expert]), (b[:, own], _) = pair
    return Scaled(a, scale), Scaled(b, torch.ones_like(scale[0]))


def scaled_weight_gradient(a: Scaled, b: Scaled, rows: Any, out: Tensor, **_: Any) -> None:
    """As the launcher of that name."""
    bounds = pairwise(rows.starts.tolist())
    for each, scale, (first, end) in zip(out, a.scale, bounds, strict=True):
        each.copy_(a.values[:, first:end].float() @ b.values[:, first:end].float().T * scale)
