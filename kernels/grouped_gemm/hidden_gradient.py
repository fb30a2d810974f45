"""dZ and dG from dY and the pre-activations, with what the gradients of w_down and of the tokens' weights need."""

from typing import Any

import torch

from ..dropout import NO_DROPOUT
from ..hopper import stacked, untransposed
from ..launching import Launch, ceil_div, prepared
from ..matmul import generic, sm90
from ..matmul.sm90.ring import TILE
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from .elements import Arithmetic, HiddenGradients
from .matrices import stacked_alike, storable
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
    columns = w_down.shape[2]

    def prepare() -> tuple[Launch, bool]:
        launch = None if pipeline is None else _on_sm90(dy, w_down, z, g, rows, keep_hidden, arithmetic, pipeline)
        if launch is not None:
            return launch, True
        return generic.prepare_hidden_gradient(
            dy, w_down, (z, g), (columns, columns), arithmetic, tiles, block=rows.block
        ), False  # fmt: skip

    launch, on_sm90 = prepared(ready, ("hidden gradient", keep_hidden, want_weights), prepare)
    dz, dg = (z, g) if in_place else (torch.empty_like(z), None if g is None else torch.empty_like(g))
    weighted = torch.empty_like(z) if keep_hidden else None
    tile_columns = ceil_div(columns, TILE.value if on_sm90 else tiles.block_n)
    partials = row_weights.new_empty(tile_columns, rows.capacity) if want_weights else None
    no_low_rank, starts = ((None, None), rows.starts) if on_sm90 else ((), rows.slots)
    launch((
        dy, w_down, z, g, dz, dg, weighted, *no_low_rank, None, None, None, rows.tile_expert, starts, row_weights,
        partials,
    ))  # fmt: skip
    return HiddenGradients(dz, dg, weighted, partials)


def _on_sm90(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    g: torch.Tensor | None,
    rows: SortedRows,
    keep_hidden: bool,
    arithmetic: Arithmetic,
    pipeline: EpiloguePipeline,
) -> Launch | None:
    """The sm90 launch, or None where an operand does not lie as TMA takes it."""
    experts, _, columns = w_down.shape
    left, down, first = untransposed(dy), stacked(w_down), untransposed(z)
    gate = None if g is None else untransposed(g)
    if left is None or down is None or first is None or (g is not None and gate is None):
        return None
    if stacked_alike([w_down.transpose(1, 2)], pipeline.step) is None or not storable(columns, dy.dtype, rows):
        return None
    return sm90.prepare_hidden_gradient(
        left, down, first, gate, (columns, columns), keep_hidden, False, arithmetic.activation, arithmetic.accuracy,
        pipeline, NO_DROPOUT, None, experts, arithmetic.limits,
    )  # fmt: skip
