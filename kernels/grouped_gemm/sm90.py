"""The launches of the kernels for experts, with the same arguments as those of the generic ones.

Each returns None, or False, where an operand does not lie as TMA takes it, or where nothing here computes what is
asked. Rows are in blocks of 128. ``ready`` belongs to one prepared call: it keeps the launches, for calls that differ
in addresses alone, and ``name`` tells those of one kind apart.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..dropout import NO_DROPOUT
from ..hopper import ALIGNMENT, Matrix, stacked, untransposed
from ..launching import Launch, ceil_div, prepared
from ..matmul.sm90 import (
    launch_hidden,
    launch_hidden_gradient,
    prepare_grouped_weight_gradient,
    prepare_hidden,
    prepare_hidden_gradient,
    prepare_product,
)
from ..matmul.sm90.ring import HALF, TILE
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from .elements import Arithmetic, HiddenGradients
from .sorting import SortedRows


def _weights(weights: Sequence[torch.Tensor], step: int) -> list[Matrix] | None:
    """Weights ``[experts, out, in]`` that are multiplied side by side, or None where they do not lie alike.

    Where weights lie transposed, the inner axis of an expert ends where that of the next one begins: it must be whole
    steps.
    """
    found = [each for each in map(stacked, weights) if each is not None]
    if len(found) < len(weights) or len({(each.transposed, each.step) for each in found}) > 1:
        return None
    return None if found[0].transposed and weights[0].shape[2] % step else found


def _storable(columns: int, dtype: torch.dtype) -> bool:
    """Whether TMA stores contiguous rows of so many columns."""
    return columns * dtype.itemsize % ALIGNMENT == 0


def _limits(arithmetic: Arithmetic) -> tuple[float, float] | None:
    return arithmetic.numbers if arithmetic.clamped else None


def hidden(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    rows: SortedRows,
    keep: bool,
    arithmetic: Arithmetic,
    *,
    config: EpiloguePipeline,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """(H, Z, G) ``[P, N]`` from sorted rows ``[P, K]``, contiguous; Z, and G with a gate, only to ``keep``."""
    experts, units, _ = w_up.shape

    def prepare() -> Launch | None:
        left, weights = untransposed(x), _weights([w_up] if w_gate is None else [w_up, w_gate], config.step)
        if left is None or weights is None or not _storable(units, x.dtype):
            return None
        if rows.block != TILE.value:
            return None
        gate = None if w_gate is None else weights[1]
        return prepare_hidden(
            left, weights[0], gate, units, keep, arithmetic.activation, arithmetic.accuracy, config, NO_DROPOUT,
            None, experts, _limits(arithmetic),
        )  # fmt: skip

    launch = prepared(ready, ("sm90 hidden", keep), prepare)
    if launch is None:
        return None
    found = x.new_empty(rows.capacity, units)
    z = torch.empty_like(found) if keep else None
    g = torch.empty_like(found) if keep and w_gate is not None else None
    biases = [None if bias is None else bias.contiguous() for bias in (b_up, b_gate)]
    launch_hidden(
        launch, (x, w_up, w_gate, found, z, g, None, None, None), (*biases, None), (rows.tile_expert, rows.starts)
    )
    return found, z, g


def product(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    rows: SortedRows,
    *,
    config: CooperativePipeline,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor | None:
    """``Σ a wᵀ + bias`` ``[P, out]`` over one or two pairs of rows a ``[P, in]`` and weights w ``[E, out, in]``."""
    [(a, w), *more] = pairs
    other, w_other = more[0] if more else (None, None)
    experts, columns, _ = w.shape

    def prepare() -> Launch | None:
        lefts, weights = [untransposed(left) for left, _ in pairs], _weights([each for _, each in pairs], config.step)
        if lefts[0] is None or weights is None or not _storable(columns, a.dtype):
            return None
        if rows.block != TILE.value or any(left is None or left[1:] != lefts[0][1:] for left in lefts):
            return None
        return prepare_product(lefts[0], weights, columns, experts, config)

    launch = prepared(ready, ("sm90 product", len(pairs)), prepare)
    if launch is None:
        return None
    out = a.new_empty(rows.capacity, columns)
    launch(
        (None if bias is None else bias.contiguous(), rows.tile_expert, rows.starts), (a, w, other, w_other, out)
    )  # fmt: skip
    return out


def hidden_gradient(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    g: torch.Tensor | None,
    row_weights: torch.Tensor,
    rows: SortedRows,
    keep_hidden: bool,
    want_weights: bool,
    arithmetic: Arithmetic,
    *,
    in_place: bool,
    config: EpiloguePipeline,
    ready: dict[Any, Any] | None = None,
) -> HiddenGradients | None:
    """From sorted rows dy ``[P, K]``, w_down ``[E, K, N]``, z and g ``[P, N]``, and the weights ``[P]`` of the rows.

    These are float32, and 0 in padding, whose results are 0 then. ``in_place`` dz and dg replace z and g.
    """
    experts, _, units = w_down.shape

    def prepare() -> Launch | None:
        left, down, first = untransposed(dy), stacked(w_down), untransposed(z)
        gate = None if g is None else untransposed(g)
        if left is None or down is None or first is None or (g is not None and gate is None):
            return None
        if _weights([w_down.transpose(1, 2)], config.step) is None or not _storable(units, dy.dtype):
            return None
        if rows.block != TILE.value:
            return None
        return prepare_hidden_gradient(
            left, down, first, gate, (units, units), keep_hidden, False, arithmetic.activation, arithmetic.accuracy,
            config, NO_DROPOUT, None, experts, _limits(arithmetic),
        )  # fmt: skip

    launch = prepared(ready, ("sm90 hidden gradient", keep_hidden, want_weights), prepare)
    if launch is None:
        return None
    dz, dg = (z, g) if in_place else (torch.empty_like(z), None if g is None else torch.empty_like(g))
    weighted = torch.empty_like(dz) if keep_hidden else None
    partials = row_weights.new_empty(ceil_div(units, TILE.value), rows.capacity) if want_weights else None
    sorting = rows.tile_expert, rows.starts, row_weights, partials
    launch_hidden_gradient(launch, (dy, w_down, z, g, dz, dg, weighted, None, None), (None, None, None), sorting)
    return HiddenGradients(dz, dg, weighted, partials)


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: SortedRows,
    out: torch.Tensor,
    *,
    config: CooperativePipeline,
    ready: dict[Any, Any] | None = None,
    name: str = "",
    order: torch.Tensor | None = None,
) -> bool:
    """Fills ``out[e] = a_eᵀ b_e``, a view ``[E, R, C]``, from a ``[P, R]`` and b ``[P, C]``; an empty expert's is 0.

    Padding is 0 in both. Experts come in the given ``order``: see :func:`longest_first`.
    """
    if out.stride(2) != 1 and out.stride(1) == 1:
        return weight_gradient(b, a, rows, out.transpose(1, 2), config=config, ready=ready, name=name, order=order)
    experts, units, _ = out.shape

    def prepare() -> Launch | None:
        left, right, gradient = untransposed(a), untransposed(b), stacked(out)
        if left is None or right is None or gradient is None or gradient.transposed or rows.block % config.step:
            return None
        # Half of a tile ends where the units of the next expert begin.
        if units % HALF.value:
            return None
        return prepare_grouped_weight_gradient(left, right, gradient, experts, units, config)

    launch = prepared(ready, ("sm90 weight gradient", name), prepare)
    if launch is None:
        return False
    launch((rows.starts, order), (a, b, out))
    return True
