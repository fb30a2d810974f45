"""The hidden of experts from rows sorted by expert, and the pre-activations where a backward pass will read them."""

from typing import Any

import torch

from ..dropout import NO_DROPOUT
from ..hopper import untransposed
from ..launching import Launch, prepared
from ..matmul import generic, sm90
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from .elements import Arithmetic
from .matrices import stacked_alike, storable
from .sorting import SortedRows


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
    gathered: bool,
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, G) ``[P, N]``, contiguous; Z, and G with a gate, only to ``keep``.

    x has the sorted rows ``[P, K]`` where they are ``gathered``, else tokens ``[M, K]``; weights ``[E, N, K]`` and
    biases ``[E, N]`` are views of any strides. Nothing is written to tiles of padding.
    """
    columns = w_up.shape[1]

    def prepare() -> tuple[Launch, bool]:
        launch = None
        if pipeline is not None and gathered:
            launch = _on_sm90(x, w_up, w_gate, rows, keep, arithmetic, pipeline)
        if launch is not None:
            return launch, True
        order = rows.order(gathered)
        return generic.prepare_hidden(
            x, (w_up, w_gate), (b_up, b_gate), rows.capacity, columns, arithmetic, tiles, order=order
        ), False  # fmt: skip

    launch, on_sm90 = prepared(ready, ("hidden", keep, gathered), prepare)
    found = x.new_empty(rows.capacity, columns)
    z = torch.empty_like(found) if keep else None
    g = torch.empty_like(found) if keep and w_gate is not None else None
    if on_sm90:
        biases = [None if bias is None else bias.contiguous() for bias in (b_up, b_gate)]
        order, scales = (rows.tile_expert, rows.starts), (None, None, None)
        launch((x, w_up, w_gate, found, z, g, None, None, None, *biases, None, *order, *scales))
    else:
        launch((x, w_up, w_gate, found, z, g, b_up, b_gate, None, rows.tile_expert, rows.slots))
    return found, z, g


def _on_sm90(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    rows: SortedRows,
    keep: bool,
    arithmetic: Arithmetic,
    pipeline: EpiloguePipeline,
) -> Launch | None:
    """The sm90 launch, or None where an operand does not lie as TMA takes it."""
    experts, columns, _ = w_up.shape
    left, weights = untransposed(x), stacked_alike([w_up] if w_gate is None else [w_up, w_gate], pipeline.step)
    if left is None or weights is None or not storable(columns, x.dtype, rows):
        return None
    gate = None if w_gate is None else weights[1]
    return sm90.prepare_hidden(
        left, weights[0], gate, columns, keep, arithmetic.activation, arithmetic.accuracy, pipeline, NO_DROPOUT, None,
        experts, arithmetic.limits,
    )  # fmt: skip
