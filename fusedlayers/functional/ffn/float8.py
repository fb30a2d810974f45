"""The FFN in 8 bits, on rows ``[M, *]``: x, h, dy, dz and the weights are quantised by rows.

The same kernels as on the epilogue path, of 8-bit operands, compute activations and their gradients with the products:
h and z from x, dz from dy. dx is one product of dz and dz_gate, side by side, with the weights' transposes, side by
side. Weight gradients are products of the transposes of x, h, dy and dz, in 8 bits, or as the recipe says those of the
epilogue path, in 16. Bias gradients are sums of dy and dz in 16 bits.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels import gemm_epilogue as kernels
from ...kernels.column_sums import column_sums
from ...kernels.dropout import Dropout
from ...kernels.float8 import quantise_rows
from ...kernels.tuning import COLUMN_SUM_TILES
from ..float8 import packed, product, quantised, quantised_transpose, quantised_weight, weight_gradients
from ..operands import rows
from ..operation import Tensors
from ..prepared import Prepared
from .epilogue import Gradients, hidden_again, weight_gradient

# What the forward pass saves: z and z_gate ``[M, N]``, and the scales ``[M]`` of the rows of x and h.
Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def forward(call: Prepared, operands: Tensors, keep: bool) -> tuple[Tensor, Saved]:
    """y ``[M, O]``, and with ``keep`` what the backward pass reads; scales only for weight gradients in 8 bits."""
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands
    plan, arithmetic = call.plan, call.details
    up, down, gate = (None if weight is None else quantised_weight(weight, call) for weight in (w_up, w_down, w_gate))
    assert up is not None
    assert down is not None
    x_values = quantised(rows(x), call.ready)
    hidden, z, z_gate = kernels.scaled_hidden(
        x_values, up, packed(b_up), gate, packed(b_gate), keep, arithmetic, plan.hidden_pipeline, x.dtype,
        Dropout(seed, arithmetic.dropout_p), call.ready.setdefault("hidden", {}),
    )  # fmt: skip
    hidden_values = quantised(hidden, call.ready)
    # Free the hidden before the next product allocates.
    del hidden
    y = product(hidden_values, down, b_down, plan.product_pipeline, x, call.ready.setdefault("down", {}))
    y = y if residual is None else y.add_(rows(residual))
    x_scale = x_values.scale if keep and plan.problem.up_gradient_in_8_bits else None
    hidden_scale = hidden_values.scale if keep and plan.problem.down_gradient_in_8_bits else None
    return y, (z, z_gate, x_scale, hidden_scale)


def gradients(call: Prepared, operands: Tensors, saved: Tensors, wanted: Sequence[bool], dy: Tensor) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate), but not that of b_down."""
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands
    x, (z, z_gate, x_scale, hidden_scale) = rows(x), saved
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    plan, arithmetic, ready = call.plan, call.details, call.ready
    dropout = Dropout(seed, arithmetic.dropout_p)
    results: Gradients = [None] * 7
    through_dz = dx or dw_up or db_up or dw_gate or db_gate
    dy_values = quantised(dy, ready) if through_dz or hidden_scale is not None else None

    def down_gradient(hidden: Tensor) -> Tensor | None:
        if dy_values is None or hidden_scale is None:
            return weight_gradient(dy, hidden)
        named: dict[Any, Any] = ready.setdefault("down gradient", {})
        return weight_gradients(dy_values, hidden, hidden_scale, [True], plan.product_pipeline, named)[0]

    if dy_values is None or not through_dz:
        results[2] = down_gradient(hidden_again(z, z_gate, arithmetic.activation, dropout))
        return results
    dz, dz_gate, hidden = kernels.scaled_hidden_gradient(
        dy_values, quantised_transpose((w_down,), call), z, z_gate, wanted[2], arithmetic, plan.gradient_pipeline,
        dropout, ready.setdefault("gradient", {}),
    )  # fmt: skip
    if hidden is not None:
        results[2] = down_gradient(hidden)
        # Free the hidden before the other products allocate.
        hidden = None
    if db_up:
        results[3] = column_sums(dz, COLUMN_SUM_TILES, ready)
    if db_gate and dz_gate is not None:
        results[6] = column_sums(dz_gate, COLUMN_SUM_TILES, ready)
    in_8_bits = x_scale is not None and (dw_up or dw_gate)
    if not in_8_bits:
        results[1] = weight_gradient(dz, x) if dw_up else None
        results[5] = weight_gradient(dz_gate, x) if dw_gate and dz_gate is not None else None
    if dx or in_8_bits:
        both = quantise_rows(dz, dz_gate, ready)
        del dz, dz_gate
        if dx:
            right = quantised_transpose((w_up,) if w_gate is None else (w_up, w_gate), call)
            results[0] = product(both, right, None, plan.product_pipeline, x, ready.setdefault("data gradient", {}))
        if in_8_bits:
            parts = [dw_up] if w_gate is None else [dw_up, dw_gate]
            named = ready.setdefault("up gradient", {})
            results[1], *gate = weight_gradients(both, x, x_scale, parts, plan.product_pipeline, named)
            results[5] = gate[0] if gate else None
    return results
