"""The hidden of experts from rows sorted by expert, and the pre-activations where a backward pass will read them."""

from typing import Any

import torch

from ..launching import Launch, prepared
from ..matmul import generic
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from . import sm90
from .elements import Arithmetic
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
    if pipeline is not None and gathered:
        kept = sm90.hidden(
            x, w_up, w_gate, b_up, b_gate, rows, keep, arithmetic, config=pipeline, ready=ready
        )  # fmt: skip
        if kept is not None:
            return kept
    columns = w_up.shape[1]

    def make() -> Launch:
        order = rows.order(gathered)
        return generic.prepare_hidden(
            x, (w_up, w_gate), (b_up, b_gate), rows.capacity, columns, arithmetic, tiles, order=order
        )  # fmt: skip

    launch = prepared(ready, ("hidden", keep, gathered), make)
    found = x.new_empty(rows.capacity, columns)
    z = torch.empty_like(found) if keep else None
    g = torch.empty_like(found) if keep and w_gate is not None else None
    launch((x, w_up, w_gate, b_up, b_gate, None, rows.slots, rows.tile_expert, found, z, g))
    return found, z, g
