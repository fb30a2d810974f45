"""The epilogue path of the FFN, on rows ``[M, *]``: two kernels of its own, and torch's products around them.

Four products read the weights, each in one place below: those of the pre-activations (``kernels.hidden``) and of the
result, the gradient of the hidden (``kernels.hidden_gradient``) and that of x (``_data_gradient``). Adapters of low
rank are further terms of these four, and have gradients of their own: see ``adapters.py``.

Weight gradients are torch's products. One kernel could compute dw_down and db_down, but cuBLAS and separate column sums
take less on an H200: 125 against 138 µs (32,768 × 512 × 2048), 134 against 181 (16,384 × 768 × 3072), 195 against 211
(16,384 × 1024 × 4096), 364 against 374 (8192 × 2048 × 8192).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...kernels import gemm_epilogue as kernels
from ...kernels.dropout import Dropout
from ...kernels.tuning import COLUMN_SUM_TILES
from ...planning import ffn_epilogue
from ..operands import rows
from ..operation import Tensors
from ..prepared import Prepared
from .adapters import FACTOR_PLACES, Adapted, AdapterGradients

Gradients = list[Tensor | None]


def forward(call: Prepared, operands: Tensors, keep: bool, adapted: Adapted | None = None) -> tuple[Tensor, Tensors]:
    """y ``[M, O]``, and with ``keep`` what the backward pass reads again.

    These are the pre-activations z and z_gate, ``[M, N]`` or a few columns more; with adapters also u, those of x and
    those of the hidden.
    """
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands[:9]
    x, plan, arithmetic = rows(x), call.plan, call.details
    tiles = plan.epilogue
    of_x, of_hidden = (None, None) if adapted is None else adapted
    u = u_hidden = low_rank = None
    if of_x is not None:
        u = of_x.u(x)
        low_rank = of_x.into_hidden(u, w_gate is not None)
    hidden, z, z_gate = kernels.hidden(
        x, w_up, b_up, w_gate, b_gate, keep, arithmetic, tiles.hidden_tiles, tiles.hidden_pipeline,
        Dropout(seed, arithmetic.dropout_p), call.ready, low_rank, for_products=adapted is None,
    )  # fmt: skip
    if of_hidden is None:
        y = F.linear(hidden, w_down, b_down)
    else:
        u_hidden = of_hidden.u(hidden)
        # The smallest term first, as every sum is rounded.
        y = of_hidden.into_result(u_hidden, b_down).addmm_(hidden, w_down.t())
    if residual is not None:
        y.add_(rows(residual))
    if adapted is None:
        return y, (z, z_gate)
    return y, (z, z_gate, u, u_hidden) if keep else (None,) * 4


def gradients(
    call: Prepared,
    operands: Tensors,
    made: Tensors,
    wanted: Sequence[bool],
    dy: Tensor,
    in_place: bool = False,
    adapted: Adapted | None = None,
) -> Gradients:
    """The wanted gradients of the operands but that of the residual, and that of b_down only along with dz.

    ``made`` is what :func:`forward` kept; ``in_place``: the gradients of pre-activations may overwrite them.
    """
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands[:9]
    x, units = rows(x), w_down.shape[1]
    z, z_gate, *inner = made
    # What was saved may have a few more columns, which are padding.
    z, z_gate = (each if each is None or each.shape[1] == units else each[:, :units] for each in (z, z_gate))
    dx, dw_up, dw_down, db_up, db_down, dw_gate, db_gate = wanted[:7]
    plan, arithmetic = call.plan, call.details
    dropout = Dropout(seed, arithmetic.dropout_p)
    terms = None if adapted is None else AdapterGradients(adapted, inner, wanted[FACTOR_PLACES], dy)
    results: Gradients = [None] * len(wanted)
    dz: Any = None
    dz_gate: Any = None
    hidden: Any = None
    needs_hidden = dw_down or (terms is not None and terms.need_hidden)
    if dx or dw_up or db_up or dw_gate or db_gate or (terms is not None and terms.need_dz):
        tiles = plan.epilogue.gradient
        low_rank, added = (None, None) if terms is None else terms.into_hidden_gradient()
        dz, dz_gate, up_sums, gate_sums, hidden, results[4] = kernels.hidden_gradient(
            dy, w_down, z, z_gate, db_up or db_gate, tiles.row_tiles, arithmetic, tiles.tiles, tiles.pipeline,
            keep_hidden=needs_hidden, for_products=terms is None,
            in_place=in_place and ffn_epilogue.in_place(call.problem, call.facts, plan.epilogue), dropout=dropout,
            column_sums=COLUMN_SUM_TILES if db_down else None, ready=call.ready, low_rank=low_rank, added=added,
        )  # fmt: skip
        results[3], results[6] = up_sums if db_up else None, gate_sums if db_gate else None
    elif needs_hidden:
        hidden = hidden_again(z, z_gate, arithmetic.activation, dropout)
    if dw_down:
        results[2] = weight_gradient(dy, hidden)
    if terms is not None:
        terms.of_hidden(hidden)
    # Free the hidden before the other products allocate.
    hidden = None
    low_rank, share = (None, None) if terms is None else terms.of_x(x, dz, dz_gate, dx)
    if low_rank is not None:
        share = torch.mm(low_rank.left, low_rank.right)
    if dx:
        results[0] = _data_gradient(dz, dz_gate, w_up, w_gate, share)
    if dw_up:
        results[1] = weight_gradient(dz, x)
    if dw_gate:
        results[5] = weight_gradient(dz_gate, x)
    if terms is not None:
        results[FACTOR_PLACES] = terms.found()
    return results


def hidden_again(z: Tensor, z_gate: Tensor | None, activation: str, dropout: Dropout) -> Tensor:
    """The hidden after its dropout, from the pre-activations, by torch."""
    hidden = reference.hidden(z, z_gate, activation=activation)
    return reference.dropped(hidden, dropout.p, dropout.seed, dropout.place)


def _side_by_side(dz: Tensor, dz_gate: Tensor) -> Tensor | None:
    """dz and dz_gate as one matrix ``[M, 2 N]``, where they are halves of it: see ``gradients_joined``."""
    rows, columns = dz.shape
    adjacent = dz_gate.storage_offset() == dz.storage_offset() + columns
    return dz.as_strided((rows, 2 * columns), (2 * columns, 1)) if adjacent else None


def _data_gradient(
    dz: Tensor, dz_gate: Tensor | None, w_up: Tensor, w_gate: Tensor | None, share: Tensor | None
) -> Tensor:
    """dx, which is added to the ``share`` of adapters: the smallest term first, as every sum is rounded."""
    if share is not None:
        dx = share.addmm_(dz, w_up)
    elif dz_gate is not None and w_gate is not None and (both := _side_by_side(dz, dz_gate)) is not None:
        return torch.mm(both, torch.cat((w_up, w_gate)))
    else:
        dx = torch.mm(dz, w_up)
    return dx if dz_gate is None or w_gate is None else dx.addmm_(dz_gate, w_gate)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """``dyᵀ x`` of dy ``[M, O]`` and x ``[M, K]``: ``[O, K]``."""
    return torch.mm(dy.t(), x)
