"""The FFN in 8 bits, on rows ``[M, *]``: x, h, dy, dz and the weights are quantised by rows.

The same kernels as on the epilogue path, of 8-bit operands, compute activations and their gradients with the products:
h and z from x, dz from dy. dx is one product of dz and dz_gate, side by side, with the weights' transposes, side by
side. Weight and bias gradients are those of the epilogue path: of x, h, dy and dz in 16 bits.
"""

from collections.abc import Sequence

from torch import Tensor

from ...kernels import gemm_epilogue as kernels
from ...kernels.column_sums import column_sums
from ...kernels.dropout import Dropout
from ...kernels.float8 import quantise_rows
from ...kernels.tuning import COLUMN_SUM_TILES
from ..float8 import packed, product, quantised, quantised_transpose, quantised_weight
from ..operands import rows
from ..operation import Tensors
from ..prepared import Prepared
from .epilogue import Gradients, hidden_again, weight_gradient


def forward(call: Prepared, operands: Tensors, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y ``[M, O]``, and with ``keep`` the pre-activations z and z_gate ``[M, N]``."""
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands
    plan, arithmetic = call.plan, call.details
    up, down, gate = (None if weight is None else quantised_weight(weight, call) for weight in (w_up, w_down, w_gate))
    assert up is not None
    assert down is not None
    hidden, z, z_gate = kernels.scaled_hidden(
        quantised(rows(x), call.ready), up, packed(b_up), gate, packed(b_gate), keep, arithmetic,
        plan.hidden_pipeline, x.dtype, Dropout(seed, arithmetic.dropout_p), call.ready.setdefault("hidden", {}),
    )  # fmt: skip
    hidden_values = quantised(hidden, call.ready)
    # Free the hidden before the next product allocates.
    del hidden
    y = product(hidden_values, down, b_down, plan.product_pipeline, x, call.ready.setdefault("down", {}))
    return y if residual is None else y.add_(rows(residual)), z, z_gate


def gradients(
    call: Prepared, operands: Tensors, pre_activations: Tensors, wanted: Sequence[bool], dy: Tensor
) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate), but not that of b_down.

    ``pre_activations`` are z and z_gate.
    """
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands
    x, (z, z_gate) = rows(x), pre_activations
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    plan, arithmetic, ready = call.plan, call.details, call.ready
    dropout = Dropout(seed, arithmetic.dropout_p)
    results: Gradients = [None] * 7
    if not (dx or dw_up or db_up or dw_gate or db_gate):
        results[2] = weight_gradient(dy, hidden_again(z, z_gate, arithmetic.activation, dropout))
        return results
    dz, dz_gate, hidden = kernels.scaled_hidden_gradient(
        quantised(dy, ready), quantised_transpose((w_down,), call), z, z_gate, wanted[2], arithmetic,
        plan.gradient_pipeline, dropout, ready.setdefault("gradient", {}),
    )  # fmt: skip
    if hidden is not None:
        results[2] = weight_gradient(dy, hidden)
        # Free the hidden before the other products allocate.
        hidden = None
    if db_up:
        results[3] = column_sums(dz, COLUMN_SUM_TILES, ready)
    if db_gate and dz_gate is not None:
        results[6] = column_sums(dz_gate, COLUMN_SUM_TILES, ready)
    if dw_up:
        results[1] = weight_gradient(dz, x)
    if dw_gate and dz_gate is not None:
        results[5] = weight_gradient(dz_gate, x)
    if dx:
        weights = (w_up,) if w_gate is None else (w_up, w_gate)
        both = quantise_rows(dz, dz_gate, ready)
        right = quantised_transpose(weights, call)
        results[0] = product(both, right, None, plan.product_pipeline, x, ready.setdefault("data gradient", {}))
    return results
