"""The experts in kernels: rows sorted by expert, products over each expert's rows, and sums in the order of tokens.

``kernels.grouped_gemm`` has the equations; the names here are theirs. In 8 bits x and dy are quantised before their
rows are copied to the experts of each token; another kernel quantises the hidden, and dZ and dG, which lie side by side
in one product for dx. Where weight gradients are in 8 bits, too, their operands are transposed once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import grouped_gemm as kernels
from ...kernels.float8 import quantise_rows, transposed_pair
from ...kernels.grouped_gemm import SortedRows
from ...kernels.hopper import Scaled
from ...planning.float8 import IN_8_BITS
from ..float8 import quantised
from ..operation import Tensors
from ..prepared import Prepared
from . import float8
from .experts import B_DOWN, B_GATE, B_UP, SCORES, W_DOWN, W_GATE, W_UP, Experts, X

_THROUGH_HIDDEN = (X, W_UP, W_GATE, B_UP, B_GATE)


def forward(call: Prepared, operands: Tensors, saving: bool) -> tuple[Tensor, Tensors]:
    """y ``[M, K]``; with ``saving`` the sorted rows, in one tensor, and the pre-activations unless recomputed."""
    x, index, scores, *rest = operands
    problem, ready = call.problem, call.ready
    experts = Experts.of(call, rest)
    packed, rows = kernels.sort(index, problem.E, problem.top_k, problem.block, ready)
    h, z, g = _hidden(call, operands, experts, rows, keep=saving and not problem.recompute)
    pair = (quantised(h, ready), float8.down(call, operands)) if _in_8_bits(call) else (h, experts.w_down)
    # In 8 bits nobody reads it again.
    del h
    ys = _product(call, [pair], experts.b_down, rows, x.dtype, "down")
    y = kernels.combine(ys, scores, rows, ready=ready)
    return y, (packed, z, g) if saving else (None, None, None)


def _in_8_bits(call: Prepared) -> bool:
    found: bool = call.plan.path == IN_8_BITS
    return found


def _hidden(
    call: Prepared, operands: Tensors, experts: Experts, rows: SortedRows, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """H of x ``[M, K]``; with ``keep`` also Z, and with a gate G."""
    plan, gathered, dtype = call.plan, call.plan.hidden_pipeline is not None, operands[X].dtype
    x, w_up, w_gate = operands[X], experts.w_up, experts.w_gate
    if _in_8_bits(call):
        x, (w_up, w_gate) = quantised(x, call.ready), float8.up_and_gate(call, operands)
    if gathered:
        # TMA loads rows of an expert that are adjacent in memory.
        x, _ = kernels.spread(x, None, rows, ready=call.ready.setdefault("x", {}))
    return kernels.hidden(
        x, w_up, w_gate, experts.b_up, experts.b_gate, rows, keep, call.details, gathered=gathered,
        tiles=plan.hidden_tiles, pipeline=plan.hidden_pipeline, dtype=dtype, ready=call.ready,
    )  # fmt: skip


def _product(
    call: Prepared, pairs: list[tuple[Any, Any]], bias: Tensor | None, rows: SortedRows, dtype: torch.dtype, name: str
) -> Tensor:
    """``Σ a wᵀ + bias`` over these pairs (a, w), as planned; ``name`` tells the products of a call apart."""
    plan = call.plan
    return kernels.product(
        pairs, bias, rows, call.problem.input_precision, tiles=plan.product_tiles, pipeline=plan.product_pipeline,
        dtype=dtype, ready=call.ready.setdefault(name, {}),
    )  # fmt: skip


def gradients(
    call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], dy: Tensor, in_place: bool = False
) -> list[Tensor | None]:
    """The wanted gradients of the operands for an upstream gradient ``[M, K]``.

    ``in_place``: nobody reads the pre-activations again, so their gradients overwrite them.
    """
    x, index, scores, *rest = operands
    problem, plan, ready = call.problem, call.plan, call.ready
    packed, z, g = made
    # Saved-tensor hooks may have changed their strides.
    index, scores = index.contiguous(), scores.contiguous()
    experts = Experts.of(call, rest)
    rows = kernels.rows_of(packed, problem.slots, problem.E, problem.block, problem.top_k)
    found: list[Tensor | None] = [None] * len(operands)

    def allocate(*positions: int) -> Experts:
        """Room for the wanted ones of these gradients, just before they are computed: then other memory is free."""
        for position in positions:
            if wanted[position]:
                found[position] = operands[position].new_empty(operands[position].shape)
        among = range(W_UP, len(found))
        return Experts.of(call, [found[position] if position in positions else None for position in among])

    # The rows of dy, and db_down = Σ w dys.
    in_8_bits, named = _in_8_bits(call), ready.setdefault("dy", {})
    upstream, row_weights = kernels.spread(quantised(dy, ready) if in_8_bits else dy, scores, rows, ready=named)
    assert row_weights is not None
    up_in_8_bits = in_8_bits and problem.up_gradient_in_8_bits
    down_in_8_bits = in_8_bits and problem.down_gradient_in_8_bits
    dys = upstream
    if in_8_bits and (wanted[B_DOWN] or (wanted[W_DOWN] and not down_in_8_bits)):
        dys, _ = kernels.spread(dy, None, rows, ready=named)
    if (db_down := allocate(B_DOWN).b_down) is not None:
        kernels.expert_sums(dys, row_weights, rows, db_down, ready=ready, name="down")
    through_hidden = any(wanted[position] for position in _THROUGH_HIDDEN)
    if not (through_hidden or wanted[SCORES] or wanted[W_DOWN]):
        return found

    # dZ and dG; w ⊙ H for dW_down; and dH' ⊙ H, summed over some columns each, for dw.
    if z is None:
        _, z, g = _hidden(call, operands, experts, rows, keep=True)
        in_place = True
    w_down = float8.down_by_columns(call, operands) if in_8_bits else experts.w_down
    dz, dg, weighted, partials = kernels.hidden_gradient(
        upstream, w_down, z, g, row_weights, rows, wanted[W_DOWN], wanted[SCORES], call.details,
        in_place=in_place, tiles=plan.hidden_gradient_tiles, pipeline=plan.hidden_gradient_pipeline, ready=ready,
    )  # fmt: skip
    del z, g, w_down
    if partials is not None:
        found[SCORES] = kernels.score_gradient(partials, index, dy, experts.b_down, rows, scores.dtype, ready=ready)

    # dW_down = dysᵀ (w ⊙ H).
    order = None
    on_sm90 = plan.weight_gradient_pipeline is not None or up_in_8_bits or down_in_8_bits
    if on_sm90 and any(wanted[W_UP : W_GATE + 1]):
        order = kernels.longest_first(rows.starts)
    if (dw_down := allocate(W_DOWN).w_down) is not None:
        assert weighted is not None
        if down_in_8_bits:
            right = quantise_rows(weighted, None, ready)
            _scaled_weight_gradients(call, upstream, right, rows, [dw_down], order, "down")
            del right
        else:
            _weight_gradient(call, dys, weighted, rows, dw_down, order, "down")
    # Free them before the gradient of the rows of x and the rows themselves are allocated.
    del dys, upstream, weighted

    # db_up = Σ dZ, db_gate = Σ dG.
    biases = allocate(B_UP, B_GATE)
    if biases.b_up is not None:
        kernels.expert_sums(dz, None, rows, biases.b_up, ready=ready, name="up")
    if biases.b_gate is not None and dg is not None:
        kernels.expert_sums(dg, None, rows, biases.b_gate, ready=ready, name="gate")

    wants_up = wanted[W_UP] or wanted[W_GATE]
    both = None
    if in_8_bits and (wanted[X] or (wants_up and up_in_8_bits)):
        both = quantise_rows(dz, dg, ready)
        if up_in_8_bits:
            # Nobody reads them again.
            del dz, dg

    # dxs = dZ W_up + dG W_gate, and dx sums each token's rows.
    if wanted[X]:
        if both is not None:
            pairs: list[tuple[Any, Any]] = [(both, float8.up_and_gate_transposed(call, operands))]
        else:
            pairs = [(dz, experts.w_up.mT)] + ([] if dg is None else [(dg, experts.w_gate.mT)])
        dxs = _product(call, pairs, None, rows, x.dtype, "data gradient")
        del pairs
        found[X] = kernels.combine(dxs, None, rows, ready=ready)
        del dxs

    # dW_up = dZᵀ xs, dW_gate = dGᵀ xs.
    if wants_up:
        x = quantised(x, ready) if up_in_8_bits else x
        xs, _ = kernels.spread(x, None, rows, ready=ready.setdefault("x", {}))
        weights = allocate(W_UP, W_GATE)
        if up_in_8_bits:
            assert both is not None
            parts = [weights.w_up, weights.w_gate][: problem.products - 1]
            _scaled_weight_gradients(call, both, xs, rows, parts, order, "up")
            return found
        if weights.w_up is not None:
            _weight_gradient(call, dz, xs, rows, weights.w_up, order, "up")
        if weights.w_gate is not None and dg is not None:
            _weight_gradient(call, dg, xs, rows, weights.w_gate, order, "gate")
    return found


def _weight_gradient(
    call: Prepared, left: Tensor, right: Tensor, rows: SortedRows, out: Tensor, order: Tensor | None, name: str
) -> None:
    """Fills ``out[e] = leftᵀ right`` over each expert's rows."""
    kernels.weight_gradient(
        left, right, rows, out, call.problem.input_precision, tiles=call.plan.weight_gradient_tiles,
        pipeline=call.plan.weight_gradient_pipeline, order=order, ready=call.ready, name=name,
    )  # fmt: skip


def _scaled_weight_gradients(
    call: Prepared, left: Scaled, right: Scaled, rows: SortedRows, outs: Sequence[Tensor | None], order: Tensor | None,
    name: str,
) -> None:  # fmt: skip
    """The same in 8 bits: the columns of left belong to one or several gradients, of which some are wanted."""
    ready = call.ready.setdefault(name, {})
    (values, scale), right = transposed_pair(left, right.values, right.scale, ready, starts=rows.starts)
    for place, (part, out) in enumerate(zip(values.chunk(len(outs)), outs, strict=True)):
        if out is not None:
            kernels.scaled_weight_gradient(
                Scaled(part, scale), right, rows, out, pipeline=call.plan.scaled_gradient_pipeline, order=order,
                ready=ready, name=f"part {place}",
            )  # fmt: skip
