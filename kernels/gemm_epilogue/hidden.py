"""H from x, if gated from both projections in one pass over x, and Z and Zg if a backward pass will read them."""

from typing import Any

import torch
import torch.nn.functional as F

from ..dropout import NO_DROPOUT, Dropout
from ..hopper import ALIGNMENT, Matrix, matrix, untransposed
from ..launching import Launch, empty_rows, prepared
from ..matmul import generic, sm90
from ..matmul.arithmetic import Arithmetic, Named
from ..matmul.low_rank import LowRank
from ..tuning import EpiloguePipeline, EpilogueTiles, hidden_stride


def hidden(
    x: torch.Tensor,
    w_up: torch.Tensor,
    b_up: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    arithmetic: Named,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None = None,
    dropout: Dropout = NO_DROPOUT,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
    for_products: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, Zg) ``[M, N]``, contiguous; Z, and Zg with a gate, only to ``keep``. Operands may have any strides.

    ``low_rank`` products are added to Z and Zg, on chip in the sm90 kernel. If ``tiles.block_inner`` is 0, torch
    computes Z and Zg, and one kernel H from them. ``for_products``: only products read H. Then rows that a kernel
    writes begin at memory sectors: H may have gaps between rows, Z and Zg meaningless columns past N. ``ready`` belongs
    to one prepared call (see ``gemm_gemm.Operands``), whose options include ``dropout.place``.
    """
    columns, width, launch, on_sm90 = prepared(
        ready, ("hidden", keep), _prepare, x, w_up, b_up, w_gate, b_gate, keep, arithmetic, tiles,
        pipeline, dropout, low_rank, for_products,
    )  # fmt: skip
    if low_rank is not None and not on_sm90:
        x, w_up, w_gate = low_rank.joined(x, w_up, w_gate, 1)
    z_gate: torch.Tensor | None = None
    if not tiles.block_inner:
        z = F.linear(x, w_up, b_up)
        z_gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
        # H overwrites Z if that is not kept and the rows need no padding. x only tells the device.
        found = empty_rows(x, x.shape[0], columns, width) if keep or width > columns else z
        launch((x, None, None, found, z, z_gate, None, None, dropout.seed, None, None))
        return (found, z, z_gate) if keep else (found, None, None)
    found = empty_rows(x, x.shape[0], columns, width)
    kept = x.new_empty(x.shape[0], width) if keep else None
    if keep and w_gate is not None:
        z_gate = x.new_empty(x.shape[0], width)
    more: tuple[torch.Tensor | None, ...] = ()
    scales: tuple[None, ...] = ()
    if on_sm90:
        more = (None,) * 3 if low_rank is None else low_rank.copied(w_up.stride(1) != 1)[:3]
        scales = None, None, None
    launch((x, w_up, w_gate, found, kept, z_gate, *more, b_up, b_gate, dropout.seed, None, None, *scales))
    return found, kept, z_gate


def _prepare(
    x: torch.Tensor,
    w_up: torch.Tensor,
    b_up: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    arithmetic: Named,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None,
    dropout: Dropout,
    low_rank: LowRank | None,
    for_products: bool,
) -> tuple[int, int, Launch, bool]:
    """(columns, columns in memory, launch, whether it is the sm90 one), shared by all executions of a prepared call."""
    rows, columns = x.shape[0], w_up.shape[0]
    width = hidden_stride(columns, x.element_size()) if for_products else columns
    pipeline = pipeline if dropout.in_whole_draws else None
    matrices = None if pipeline is None else _matrices(x, w_up, w_gate, b_up, b_gate)
    if pipeline is not None and matrices is not None:
        made = sm90.prepare_hidden(
            *matrices,
            columns,
            keep,
            arithmetic.activation,
            arithmetic.accuracy,
            pipeline,
            dropout,
            low_rank,
            width=width,
        )
        if made is not None:
            return columns, width, made, True
    if low_rank is not None:
        x, w_up, w_gate = low_rank.joined(x, w_up, w_gate, 1)
    launch = generic.prepare_hidden(
        x, (w_up, w_gate), (b_up, b_gate), rows, width, Arithmetic.of(arithmetic), tiles, dropout=dropout
    )
    return columns, width, launch, False


def _matrices(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
) -> tuple[Matrix, Matrix, Matrix | None] | None:
    """The operands as TMA sees them, or None if it cannot read one of them or a bias is not contiguous.

    Weights may be transposed, if both are.
    """
    if any(bias is not None and bias.stride(0) != 1 for bias in (b_up, b_gate)):
        return None
    rows, up = untransposed(x), matrix(w_up)
    gate = None if w_gate is None else matrix(w_gate)
    if rows is None or up is None or (w_gate is not None and gate is None):
        return None
    if gate is not None and gate.transposed != up.transposed:
        return None
    # Rows of the results must be aligned, too.
    if w_up.shape[0] * x.element_size() % ALIGNMENT:
        return None
    return rows, up, gate
