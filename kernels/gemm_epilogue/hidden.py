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
    rows, columns = x.shape[0], w_up.shape[0]

    def prepare() -> tuple[int, Launch, bool]:
        """(columns in memory, launch, whether it is the sm90 one)"""
        width = hidden_stride(columns, x.element_size()) if for_products else columns
        how = Arithmetic.of(arithmetic)
        matrices = _matrices(x, w_up, w_gate, b_up, b_gate)
        if pipeline is not None and dropout.in_whole_draws and matrices is not None:
            launch = sm90.prepare_hidden(*matrices, columns, keep, how, pipeline, dropout, low_rank, width=width)
            if launch is not None:
                return width, launch, True
        left, up, gate = (x, w_up, w_gate) if low_rank is None else low_rank.joined(x, w_up, w_gate, 1)
        biases = b_up, b_gate
        launch = generic.prepare_hidden(left, (up, gate), biases, rows, width, how, tiles, dropout=dropout)
        return width, launch, False

    width, launch, on_sm90 = prepared(ready, ("hidden", keep), prepare)
    if low_rank is not None and not on_sm90:
        x, w_up, w_gate = low_rank.joined(x, w_up, w_gate, 1)
    z_gate: torch.Tensor | None = None
    if not tiles.block_inner:
        z = F.linear(x, w_up, b_up)
        z_gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
        # H overwrites Z if that is not kept and the rows need no padding. x only tells the device.
        found = empty_rows(x, rows, columns, width) if keep or width > columns else z
        launch((x, None, None, found, z, z_gate, None, None, dropout.seed, None, None))
        return (found, z, z_gate) if keep else (found, None, None)
    found = empty_rows(x, rows, columns, width)
    kept = x.new_empty(rows, width) if keep else None
    if keep and w_gate is not None:
        z_gate = x.new_empty(rows, width)
    if on_sm90:
        factors = (None, None, None) if low_rank is None else low_rank.copied(w_up.stride(1) != 1)[:3]
        launch((
            x, w_up, w_gate, found, kept, z_gate, *factors, b_up, b_gate, dropout.seed, None, None, None, None, None,
        ))  # fmt: skip
    else:
        launch((x, w_up, w_gate, found, kept, z_gate, b_up, b_gate, dropout.seed, None, None))
    return found, kept, z_gate


def _matrices(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
) -> tuple[Matrix, Matrix, Matrix | None] | None:
    """The operands as TMA sees them, or None if it cannot read one of them, or if a bias is not contiguous.

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
