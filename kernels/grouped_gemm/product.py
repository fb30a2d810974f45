"""Products of rows sorted by expert with their expert's weight: the second projection, and the gradient of the rows."""

from collections.abc import Sequence
from typing import Any

import torch

from ..hopper import untransposed
from ..launching import Launch, prepared
from ..matmul import generic, sm90
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from .elements import Arithmetic
from .matrices import stacked_alike, storable
from .sorting import SortedRows


def product(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    rows: SortedRows,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: CooperativePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``Σ a wᵀ + bias`` ``[P, out]`` over one or two pairs of contiguous rows a ``[P, in]`` and w ``[E, out, in]``.

    Weights and the bias ``[E, out]`` are views of any strides. Nothing is written to tiles of padding.
    """
    [(a, w), *more] = pairs
    other, w_other = more[0] if more else (None, None)

    def prepare() -> tuple[Launch, bool]:
        launch = None if pipeline is None else _on_sm90(pairs, rows, pipeline)
        if launch is not None:
            return launch, True
        arithmetic = Arithmetic("identity", "exact", input_precision)
        return generic.prepare_product(a, (w, w_other), bias, arithmetic, tiles, order=rows.order()), False

    launch, on_sm90 = prepared(ready, ("product", len(pairs)), prepare)
    out = a.new_empty(rows.capacity, w.shape[1])
    if on_sm90 and bias is not None:
        bias = bias.contiguous()
    launch((a, w, other, w_other, out, bias, rows.tile_expert, rows.starts if on_sm90 else rows.slots))
    return out


def _on_sm90(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: SortedRows, pipeline: CooperativePipeline
) -> Launch | None:
    """The sm90 launch, or None where an operand does not lie as TMA takes it."""
    experts, columns, _ = pairs[0][1].shape
    lefts, weights = [untransposed(left) for left, _ in pairs], stacked_alike([w for _, w in pairs], pipeline.step)
    first = lefts[0]
    if first is None or weights is None or not storable(columns, pairs[0][0].dtype, rows):
        return None
    if any(left is None or left[1:] != first[1:] for left in lefts):
        return None
    return sm90.prepare_product(first, weights, columns, experts, pipeline)
