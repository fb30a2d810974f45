"""Products of rows sorted by expert with their expert's weight: the second projection, and the gradient of the rows."""

from collections.abc import Sequence
from typing import Any

import torch

from ..launching import Launch, prepared
from ..matmul import generic
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from . import sm90
from .elements import Arithmetic
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
    if pipeline is not None:
        found = sm90.product(pairs, bias, rows, config=pipeline, ready=ready)
        if found is not None:
            return found
    [(a, w), *more] = pairs
    other, w_other = more[0] if more else (None, None)

    def make() -> Launch:
        arithmetic = Arithmetic("identity", "exact", input_precision)
        return generic.prepare_product(a, (w, w_other), bias, arithmetic, tiles, order=rows.order())

    launch = prepared(ready, ("product", len(pairs)), make)
    out = a.new_empty(rows.capacity, w.shape[1])
    launch((a, w, bias, out, other, w_other, rows.slots, rows.tile_expert))
    return out
