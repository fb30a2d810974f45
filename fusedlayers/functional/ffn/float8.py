"""The FFN in 8 bits, on rows ``[M, *]``: x, h, dy, dz and the weights are quantised by rows.

The same kernels as on the epilogue path, of 8-bit operands, compute activations and their gradients with the products:
h and z from x, dz from dy. If they are bounded (``kernels.bounds``), these kernels write h and dz in 8 bits; else they
are quantised by kernels of their own. dx is one product of dz and dz_gate, side by side, with the weights' transposes,
side by side. Weight gradients are products of the transposes of x, h, dy and dz, in 8 bits, or as the recipe says those
of the epilogue path, in 16. Bias gradients are sums of dy and dz.

Adapters of low rank stay in 16 bits, with gradients from x, h, dy and dz in 16 bits. What they add to one of the four
products is added to its sum on chip.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import gemm_epilogue as kernels
from ...kernels.bounds import MOST_SLOPE, gradient_rows, row_table
from ...kernels.column_sums import column_sums
from ...kernels.dropout import Dropout
from ...kernels.float8 import quantise_rows
from ...kernels.hopper import Scaled
from ...kernels.tuning import COLUMN_SUM_TILES
from ..custom_ops import Result
from ..float8 import (
    ffn_transposes,
    ffn_weights,
    packed,
    product,
    quantised,
    quantised_transpose,
    quantised_weight,
    weight_gradients,
)
from ..operands import rows
from ..operation import Tensors
from ..prepared import Prepared
from .adapters import FACTOR_PLACES, Adapted, AdapterGradients
from .epilogue import Gradients, hidden_again, weight_gradient


def forward(call: Prepared, operands: Tensors, keep: bool, adapted: Adapted | None = None) -> tuple[Tensor, Tensors]:
    """y ``[M, O]``, and with ``keep`` what the backward pass reads: see :func:`saved`, and with adapters u of both."""
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands[:9]
    plan, arithmetic, ready = call.plan, call.details, call.ready
    problem, dropout, scale = plan.problem, Dropout(seed, arithmetic.dropout_p), 1 / (1 - arithmetic.dropout_p)
    of_x, of_hidden = (None, None) if adapted is None else adapted
    u = None if of_x is None else of_x.u(rows(x))
    low_rank = None if of_x is None or u is None else of_x.into_hidden(u, w_gate is not None)
    x_norms: Any = None
    units: Any = None
    hidden_rows: Any = None
    if problem.bounded:
        up, gate, down, units, channels = ffn_weights(w_up, w_gate, w_down, b_up, call)
        x_norms = x.new_empty(problem.M, dtype=torch.float32)
        x_values = quantised(rows(x), ready, x_norms, channels)
        hidden_rows = row_table(x_values, x_norms, w_gate is not None, b_up is not None, scale, ready)
        left = Scaled(x_values.values, hidden_rows[0].view(torch.int32))
    else:
        up, down = quantised_weight(w_up, call), quantised_weight(w_down, call)
        gate = None if w_gate is None else quantised_weight(w_gate, call)
        left = x_values = quantised(rows(x), ready)
    hidden, z, z_gate = kernels.scaled_hidden(
        left, up, packed(b_up), gate, packed(b_gate), keep, arithmetic, plan.hidden_pipeline, x.dtype, dropout,
        ready.setdefault("hidden", {}), low_rank,
    )  # fmt: skip
    hidden_values = quantised(hidden, ready) if hidden_rows is None else Scaled(hidden, hidden_rows[1])
    u_hidden = None if of_hidden is None else of_hidden.u(hidden)
    # Free the hidden before the next product allocates.
    del hidden
    low_rank = None if of_hidden is None or u_hidden is None else of_hidden.onto_result(u_hidden)
    y = product(hidden_values, down, b_down, plan.product_pipeline, x, ready.setdefault("down", {}), low_rank)
    y = y if residual is None else y.add_(rows(residual))
    if adapted is not None:
        return y, (z, z_gate, u, u_hidden) if keep else (None,) * 4
    if not keep:
        return y, (None,) * len(_Saved._fields)
    bounded = problem.gradients_bounded
    return y, _Saved(
        z=z,
        z_gate=z_gate,
        x_scale=x_values.scale if problem.up_gradient_in_8_bits else None,
        hidden_scale=hidden_values.scale if problem.down_gradient_in_8_bits and not bounded else None,
        x_norms=x_norms if bounded and problem.gated else None,
        hidden_rows=hidden_rows if bounded else None,
        # What autograd saves of it must not be what is kept with the weights.
        units=units.detach() if bounded else None,
    )


class _Saved(NamedTuple):
    """What the backward pass without adapters reads, None where it needs no such thing.

    The pre-activations ``[M, N]``, and the scales of the rows of x and of the hidden ``[M]``. If gradients are bounded,
    the norms of x ``[M]`` and the tables of the hidden's rows ``[3, M]`` and of its units ``[6, N]`` instead of the
    latter.
    """

    z: Any
    z_gate: Any
    x_scale: Any
    hidden_scale: Any
    x_norms: Any
    hidden_rows: Any
    units: Any


def saved(problem: Any) -> list[Result | None]:
    """The fields of what is saved behind the pre-activations."""
    bounded = problem.gradients_bounded
    present = [
        ((problem.M,), problem.up_gradient_in_8_bits),
        ((problem.M,), problem.down_gradient_in_8_bits and not bounded),
        ((problem.M,), bounded and problem.gated),
        ((3, problem.M), bounded),
        ((6, problem.N), bounded),
    ]
    return [Result(shape, torch.float32) if problem.training and each else None for shape, each in present]


def gradients(
    call: Prepared,
    operands: Tensors,
    made: Tensors,
    wanted: Sequence[bool],
    dy: Tensor,
    adapted: Adapted | None = None,
) -> Gradients:
    """The wanted gradients of the operands but those of b_down and of the residual."""
    x, w_up, w_down, _, _, w_gate, _, _, seed = operands[:9]
    x, kept = rows(x), _Saved(*made) if adapted is None else _Saved(*made[:2], *[None] * 5)
    z, z_gate = kept.z, kept.z_gate
    terms = None if adapted is None else AdapterGradients(adapted, made[2:], wanted[FACTOR_PLACES], dy)
    dx, dw_up, db_up, dw_gate, db_gate = (wanted[position] for position in (0, 1, 3, 5, 6))
    plan, arithmetic, ready = call.plan, call.details, call.ready
    dropout, scale = Dropout(seed, arithmetic.dropout_p), 1 / (1 - arithmetic.dropout_p)
    results: Gradients = [None] * len(wanted)
    through_dz = dx or dw_up or db_up or dw_gate or db_gate or (terms is not None and terms.need_dz)
    needs_hidden = wanted[2] or (terms is not None and terms.need_hidden)
    bounded = plan.problem.gradients_bounded and through_dz
    # Without a product for dz a hidden that would be bounded comes in 16 bits.
    down_in_8_bits = bounded or kept.hidden_scale is not None
    dy_norms = dy.new_empty(dy.shape[0], dtype=torch.float32) if bounded else None
    dy_values = quantised(dy, ready, dy_norms) if through_dz or down_in_8_bits else None

    dz: Any = None
    dz_gate: Any = None
    hidden: Any = None
    transposes: Any = None
    gradient_scales: Any = None
    if dy_values is not None and through_dz:
        low_rank, added = (None, None) if terms is None else terms.into_hidden_gradient()
        left, units, inverses = dy_values, None, None
        if dy_norms is None:
            down = quantised_transpose((w_down,), call)
        else:
            transposes = ffn_transposes(w_up, w_gate, w_down, kept.units, dx, call)
            scales, gradient_scales = gradient_rows(dy_values, dy_norms, kept.x_norms, MOST_SLOPE * scale, ready)
            left, down = Scaled(dy_values.values, scales), transposes.down
            units, inverses = kept.units[4].view(torch.int32), kept.hidden_rows[2]
        dz, dz_gate, hidden = kernels.scaled_hidden_gradient(
            left, down, z, z_gate, needs_hidden, arithmetic, plan.gradient_pipeline, dropout,
            ready.setdefault("gradient", {}), low_rank, added, units, inverses,
        )  # fmt: skip
    elif needs_hidden:
        hidden = hidden_again(z, z_gate, arithmetic.activation, dropout)
    if wanted[2] and dy_values is not None and down_in_8_bits:
        hidden_scale, factors = (kept.hidden_rows[1], kept.units[5]) if bounded else (kept.hidden_scale, None)
        named: dict[Any, Any] = ready.setdefault("down gradient", {})
        [results[2]] = weight_gradients(
            dy_values, hidden, hidden_scale, [True], plan.product_pipeline, x.dtype, named, (None, factors)
        )
    elif wanted[2]:
        results[2] = weight_gradient(dy, hidden)
    if terms is not None:
        terms.of_hidden(hidden)
    # Free the hidden before the other products allocate.
    hidden = None
    if db_up and transposes is not None:
        # What is bounded has no gate if it has a bias.
        sums = column_sums(dz, COLUMN_SUM_TILES, ready, gradient_scales)
        results[3] = (sums * transposes.factors[0]).to(x.dtype)
    elif db_up:
        results[3] = column_sums(dz, COLUMN_SUM_TILES, ready)
    if db_gate:
        results[6] = column_sums(dz_gate, COLUMN_SUM_TILES, ready)
    in_8_bits = kept.x_scale is not None and (dw_up or dw_gate)
    if not in_8_bits:
        results[1] = weight_gradient(dz, x) if dw_up else None
        results[5] = weight_gradient(dz_gate, x) if dw_gate else None
    low_rank, share = (None, None) if terms is None else terms.of_x(x, dz, dz_gate, dx)
    if dx or in_8_bits:
        both = quantise_rows(dz, dz_gate, ready) if transposes is None else Scaled(dz, gradient_scales)
        del dz, dz_gate
        if dx:
            first = (w_up,) if w_gate is None else (w_up, w_gate)
            right = quantised_transpose(first, call) if transposes is None else transposes.up
            named = ready.setdefault("data gradient", {})
            found = product(both, right, None, plan.product_pipeline, x, named, low_rank)
            results[0] = found if share is None else found.add_(share)
        if in_8_bits:
            parts = [dw_up] if w_gate is None else [dw_up, dw_gate]
            named = ready.setdefault("up gradient", {})
            factors = None if transposes is None else transposes.factors
            results[1], *gate = weight_gradients(
                both, x, kept.x_scale, parts, plan.product_pipeline, x.dtype, named, (factors, None)
            )
            results[5] = gate[0] if gate else None
    if terms is not None:
        results[FACTOR_PLACES] = terms.found()
    return results
