"""The epilogue path of the FFN, on rows ``[M, *]``: two kernels of its own, and torch's products around them.

Among these are the weight gradients. One kernel could give dw_down with db_down, but at these sizes the product of
cuBLAS and sums of columns of their own take less: 125 against 138 µs (32,768 × 512 × 2048), 134 against 181 (16,384 ×
768 × 3072), 195 against 211 (16,384 × 1024 × 4096), 364 against 374 (8192 × 2048 × 8192) on an H200.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue as kernels
from ..kernels.dropout import Dropout
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import Plan

Gradients = list[Tensor | None]


def forward(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    residual: Tensor | None,
    dropout: Dropout,
    plan: Plan,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y ``[M, O]``, and the pre-activations z and z_gate ``[M, N]`` to ``keep``."""
    assert plan.epilogue is not None
    problem, tiles = plan.problem, plan.epilogue
    hidden, z, z_gate = kernels.hidden(
        x, w_up, b_up, w_gate, b_gate, keep, problem.activation, plan.accuracy, problem.input_precision,
        tiles.hidden_tiles, tiles.hidden_pipeline, dropout,
    )  # fmt: skip
    y = F.linear(hidden, w_down, b_down)
    return y if residual is None else y.add_(residual), z, z_gate


def gradients(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    pre_activations: tuple[Tensor, Tensor | None],
    wanted: tuple[bool, ...],
    dy: Tensor,
    dropout: Dropout,
    plan: Plan,
) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate); that of b_down with those of the hidden.

    ``tensors`` are x, w_up, w_down and w_gate, ``pre_activations`` z and z_gate.
    """
    x, w_up, w_down, w_gate = tensors
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    problem = plan.problem
    if not (dx or dw_up or db_up or dw_gate or db_gate):
        again = reference.hidden(*pre_activations, activation=problem.activation)
        again = reference.dropped(again, dropout.p, dropout.seed, dropout.place)
        return [None, None, _weight_gradient(dy, again), None, None, None, None]
    assert plan.epilogue is not None
    tiles = plan.epilogue.gradient
    assert tiles is not None
    assert tiles.tiles is not None
    dz, dz_gate, up_sums, gate_sums, hidden, db_down = kernels.hidden_gradient(
        dy, w_down, *pre_activations, db_up or db_gate, tiles.row_tiles, problem.activation, plan.accuracy,
        problem.input_precision, tiles.tiles, tiles.pipeline, keep_hidden=wanted[2], side_by_side=True,
        dropout=dropout, column_sums=COLUMN_SUM_TILES if wanted[4] else None,
    )  # fmt: skip
    results: Gradients = [None] * 7
    results[3], results[4], results[6] = up_sums if db_up else None, db_down, gate_sums if db_gate else None
    if hidden is not None:
        results[2] = _weight_gradient(dy, hidden)
        # Before the other products take memory of their own.
        hidden = None
    if dx:
        results[0] = _data_gradient(dz, dz_gate, w_up, w_gate)
    both = _side_by_side(dz) if dw_up and dw_gate else None
    if both is not None:
        results[1], results[5] = _both_weights(both, x)
        return results
    if dw_up:
        results[1] = _weight_gradient(dz, x)
    if dw_gate and dz_gate is not None:
        results[5] = _weight_gradient(dz_gate, x)
    return results


def _side_by_side(dz: Tensor) -> Tensor | None:
    """dz and dz_gate as one matrix ``[M, 2 N]``, where they are halves of it."""
    (rows, columns), width = dz.shape, dz.stride(0)
    return dz.as_strided((rows, width), (width, 1)) if width == 2 * columns else None


def _both_weights(both: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of w_up and w_gate, the halves of one product: it fills the processors better than two would."""
    dw, columns = both.T @ x, both.shape[1] // 2
    return dw[:columns], dw[columns:]


def _data_gradient(dz: Tensor, dz_gate: Tensor | None, w_up: Tensor, w_gate: Tensor | None) -> Tensor:
    if dz_gate is None or w_gate is None:
        return dz @ w_up
    if 2 * dz.shape[1] < dz.shape[0] and (both := _side_by_side(dz)) is not None:
        # One product of both, so that dx is rounded once and not read again. The weights are copied for it, which takes
        # less than reading dx where they have fewer rows.
        return both @ torch.cat((w_up, w_gate))
    return torch.addmm(dz @ w_up, dz_gate, w_gate)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.T @ x
