"""dZ and dG from dY and the pre-activations, with what the gradients of w_down and of the tokens' weights need."""

from typing import Any

import torch

from ..launching import Launch, ceil_div, prepared
from ..matmul import generic
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from . import sm90
from .elements import Arithmetic, HiddenGradients
from .sorting import SortedRows


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
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> HiddenGradients:
    """From sorted rows dy ``[P, K]``, w_down ``[E, K, N]``, a view of any strides, and z and g ``[P, N]``.

    ``row_weights`` ``[P]``, float32, are what the results of the experts are multiplied by. ``keep_hidden`` asks for
    w ⊙ H, ``want_weights`` for the partial sums. ``in_place`` dz and dg replace z and g.
    """
    if pipeline is not None:
        found = sm90.hidden_gradient(
            dy, w_down, z, g, row_weights, rows, keep_hidden, want_weights, arithmetic, in_place=in_place,
            config=pipeline, ready=ready,
        )  # fmt: skip
        if found is not None:
            return found
    columns = w_down.shape[2]

    def make() -> Launch:
        return generic.prepare_hidden_gradient(
            dy, w_down, (z, g), (columns, columns), arithmetic, tiles, block=rows.block
        )  # fmt: skip

    launch = prepared(ready, ("hidden gradient", keep_hidden, want_weights), make)
    dz, dg = (z, g) if in_place else (torch.empty_like(z), None if g is None else torch.empty_like(g))
    weighted = torch.empty_like(z) if keep_hidden else None
    tile_columns = ceil_div(columns, tiles.block_n)
    partials = row_weights.new_empty(tile_columns, rows.capacity) if want_weights else None
    launch(
        (dy, w_down, z, g, dz, dg, weighted, partials, None, None, row_weights, rows.slots, rows.tile_expert)
    )  # fmt: skip
    return HiddenGradients(dz, dg, weighted, partials)
