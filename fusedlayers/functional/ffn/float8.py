"""The FFN in 8 bits, on rows ``[M, *]``: x, h, dy, dz and the weights are quantised by rows.

The same kernels as on the epilogue path, of 8-bit operands, compute activations and their gradients with the products:
h and z from x, dz from dy. dx is one product of dz and dz_gate, side by side, with the weights' transposes, side by
side. Weight gradients are products of the transposes of x, h, dy and dz, in 8 bits, or as the recipe says those of the
epilogue path, in 16. Bias gradients are sums of dy and dz in 16 bits.

Adapters of low rank stay in 16 bits, with gradients from x, h, dy and dz in 16 bits. What they add to one of the four
products is added to its sum on chip.
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
from .adapters import FACTOR_PLACES, Adapted, AdapterGradients
from .epilogue import Gradients, hidden_again, weight_gradient


def forward(call: Prepared, operands: Tensors, keep: bool, adapted: Adapted | None = None) -> tuple[Tensor, Tensors]:
    """y ``[M, O]``, and with ``keep`` what the backward pass reads.

    These are z and z_gate ``[M, N]``, and the scales ``[M]`` of the rows of x and h if weight gradients are computed in
    8 bits; with adapters in their place u of x and u of the hidden.
    """
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands[:9]
    plan, arithmetic = call.plan, call.details
    of_x, of_hidden = (None, None) if adapted is None else adapted
    u = None if of_x is None else of_x.u(rows(x))
    low_rank = None if of_x is None or u is None else of_x.into_hidden(u, w_gate is not None)
    up, down, gate = (None if weight is None else quantised_weight(weight, call) for weight in (w_up, w_down, w_gate))
    assert up is not None
    assert down is not None
    x_values = quantised(rows(x), call.ready)
    hidden, z, z_gate = kernels.scaled_hidden(
        x_values, up, packed(b_up), gate, packed(b_gate), keep, arithmetic, plan.hidden_pipeline, x.dtype,
        Dropout(seed, arithmetic.dropout_p), call.ready.setdefault("hidden", {}), low_rank,
    )  # fmt: skip
    hidden_values = quantised(hidden, call.ready)
    u_hidden = None if of_hidden is None else of_hidden.u(hidden)
    # Free the hidden before the next product allocates.
    del hidden
    low_rank = None if of_hidden is None or u_hidden is None else of_hidden.onto_result(u_hidden)
    y = product(hidden_values, down, b_down, plan.product_pipeline, x, call.ready.setdefault("down", {}), low_rank)
    y = y if residual is None else y.add_(rows(residual))
    if adapted is not None:
        return y, (z, z_gate, u, u_hidden) if keep else (None,) * 4
    x_scale = x_values.scale if keep and plan.problem.up_gradient_in_8_bits else None
    hidden_scale = hidden_values.scale if keep and plan.problem.down_gradient_in_8_bits else None
    return y, (z, z_gate, x_scale, hidden_scale)


def gradients(
    call: Prepared,
    operands: Tensors,
    saved: Tensors,
    wanted: Sequence[bool],
    dy: Tensor,
    adapted: Adapted | None = None,
) -> Gradients:
    """The wanted gradients of the operands but those of b_down and of the residual."""
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands[:9]
    x, (z, z_gate, *inner) = rows(x), saved
    terms = None if adapted is None else AdapterGradients(adapted, inner, wanted[FACTOR_PLACES], dy)
    scales: Sequence[Any] = inner if adapted is None else (None, None)
    x_scale, hidden_scale = scales
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    plan, arithmetic, ready = call.plan, call.details, call.ready
    dropout = Dropout(seed, arithmetic.dropout_p)
    results: Gradients = [None] * len(wanted)
    through_dz = dx or dw_up or db_up or dw_gate or db_gate or (terms is not None and terms.need_dz)
    needs_hidden = wanted[2] or (terms is not None and terms.need_hidden)
    dy_values = quantised(dy, ready) if through_dz or hidden_scale is not None else None

    def down_gradient(hidden: Tensor) -> Tensor | None:
        if dy_values is None or hidden_scale is None:
            return weight_gradient(dy, hidden)
        named: dict[Any, Any] = ready.setdefault("down gradient", {})
        return weight_gradients(dy_values, hidden, hidden_scale, [True], plan.product_pipeline, named)[0]

    dz: Any = None
    dz_gate: Any = None
    hidden: Any = None
    if dy_values is not None and through_dz:
        low_rank, added = (None, None) if terms is None else terms.into_hidden_gradient()
        dz, dz_gate, hidden = kernels.scaled_hidden_gradient(
            dy_values, quantised_transpose((w_down,), call), z, z_gate, needs_hidden, arithmetic,
            plan.gradient_pipeline, dropout, ready.setdefault("gradient", {}), low_rank, added,
        )  # fmt: skip
    elif needs_hidden:
        hidden = hidden_again(z, z_gate, arithmetic.activation, dropout)
    if wanted[2]:
        results[2] = down_gradient(hidden)
    if terms is not None:
        terms.of_hidden(hidden)
    # Free the hidden before the other products allocate.
    hidden = None
    if db_up:
        results[3] = column_sums(dz, COLUMN_SUM_TILES, ready)
    if db_gate:
        results[6] = column_sums(dz_gate, COLUMN_SUM_TILES, ready)
    in_8_bits = x_scale is not None and (dw_up or dw_gate)
    if not in_8_bits:
        results[1] = weight_gradient(dz, x) if dw_up else None
        results[5] = weight_gradient(dz_gate, x) if dw_gate else None
    low_rank, share = (None, None) if terms is None else terms.of_x(x, dz, dz_gate, dx)
    if dx or in_8_bits:
        both = quantise_rows(dz, dz_gate, ready)
        del dz, dz_gate
        if dx:
            right = quantised_transpose((w_up,) if w_gate is None else (w_up, w_gate), call)
            named = ready.setdefault("data gradient", {})
            found = product(both, right, None, plan.product_pipeline, x, named, low_rank)
            results[0] = found if share is None else found.add_(share)
        if in_8_bits:
            parts = [dw_up] if w_gate is None else [dw_up, dw_gate]
            named = ready.setdefault("up gradient", {})
            results[1], *gate = weight_gradients(both, x, x_scale, parts, plan.product_pipeline, named)
            results[5] = gate[0] if gate else None
    if terms is not None:
        results[FACTOR_PLACES] = terms.found()
    return results
