"""The epilogue path of the FFN, on rows ``[M, *]``: two kernels of its own, and torch's products around them.

Weight gradients are torch's products. One kernel could compute dw_down and db_down, but cuBLAS and separate column sums
take less on an H200: 125 against 138 µs (32,768 × 512 × 2048), 134 against 181 (16,384 × 768 × 3072), 195 against 211
(16,384 × 1024 × 4096), 364 against 374 (8192 × 2048 × 8192).
"""

from collections.abc import Sequence

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

Gradients = list[Tensor | None]


def forward(call: Prepared, operands: Tensors, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y ``[M, O]``, and with ``keep`` the pre-activations z and z_gate: ``[M, N]``, or a few columns more."""
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands
    plan, arithmetic = call.plan, call.details
    tiles = plan.epilogue
    hidden, z, z_gate = kernels.hidden(
        rows(x), w_up, b_up, w_gate, b_gate, keep, arithmetic, tiles.hidden_tiles, tiles.hidden_pipeline,
        Dropout(seed, arithmetic.dropout_p), ready=call.ready, for_products=True,
    )  # fmt: skip
    y = F.linear(hidden, w_down, b_down)
    return y if residual is None else y.add_(rows(residual)), z, z_gate


def gradients(
    call: Prepared,
    operands: Tensors,
    pre_activations: Tensors,
    wanted: Sequence[bool],
    dy: Tensor,
    in_place: bool = False,
) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate); that of b_down only along with dz.

    ``pre_activations`` are z and z_gate; ``in_place``: their gradients may overwrite them.
    """
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands
    x, units = rows(x), w_down.shape[1]
    # What was saved may have a few more columns, which are padding.
    z, z_gate = (each if each is None or each.shape[1] == units else each[:, :units] for each in pre_activations)
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    plan, arithmetic = call.plan, call.details
    dropout = Dropout(seed, arithmetic.dropout_p)
    if not (dx or dw_up or db_up or dw_gate or db_gate):
        return [None, None, weight_gradient(dy, hidden_again(z, z_gate, arithmetic.activation, dropout)), *[None] * 4]
    tiles = plan.epilogue.gradient
    dz, dz_gate, up_sums, gate_sums, hidden, db_down = kernels.hidden_gradient(
        dy, w_down, z, z_gate, db_up or db_gate, tiles.row_tiles, arithmetic, tiles.tiles, tiles.pipeline,
        keep_hidden=wanted[2], for_products=True,
        in_place=in_place and ffn_epilogue.in_place(call.problem, call.facts, plan.epilogue), dropout=dropout,
        column_sums=COLUMN_SUM_TILES if wanted[4] else None, ready=call.ready,
    )  # fmt: skip
    results: Gradients = [None] * 7
    results[3], results[4], results[6] = up_sums if db_up else None, db_down, gate_sums if db_gate else None
    if hidden is not None:
        results[2] = weight_gradient(dy, hidden)
        # Free the hidden before the other products allocate.
        hidden = None
    if dx:
        results[0] = _data_gradient(dz, dz_gate, w_up, w_gate)
    if dw_up:
        results[1] = weight_gradient(dz, x)
    if dw_gate and dz_gate is not None:
        results[5] = weight_gradient(dz_gate, x)
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


def _data_gradient(dz: Tensor, dz_gate: Tensor | None, w_up: Tensor, w_gate: Tensor | None) -> Tensor:
    if dz_gate is None or w_gate is None:
        return torch.mm(dz, w_up)
    if (both := _side_by_side(dz, dz_gate)) is not None:
        return torch.mm(both, torch.cat((w_up, w_gate)))
    return torch.addmm(torch.mm(dz, w_up), dz_gate, w_gate)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """``dyᵀ x`` of dy ``[M, O]`` and x ``[M, K]``: ``[O, K]``."""
    return torch.mm(dy.t(), x)
