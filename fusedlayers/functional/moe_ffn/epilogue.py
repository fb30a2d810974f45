"""The experts in kernels: rows sorted by expert, products over each expert's rows, and sums in the order of tokens.

``kernels.grouped_gemm`` has the equations; the names here are theirs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels import grouped_gemm as kernels
from ...kernels.grouped_gemm import SortedRows
from ..operation import Tensors
from ..prepared import Prepared

# Positions of the operands.
_X, _INDEX, SCORES, _W_UP, _W_DOWN, _W_GATE, B_UP, B_DOWN, B_GATE = range(9)
_THROUGH_HIDDEN = (_X, _W_UP, _W_GATE, B_UP, B_GATE)


class _Experts(NamedTuple):
    """Weights ``[E, out, in]`` and biases ``[E, out]``, or their gradients, as views of whatever layout a call has.

    Each is a tensor or None.
    """

    w_up: Any
    w_down: Any
    w_gate: Any
    b_up: Any
    b_down: Any
    b_gate: Any

    @classmethod
    def of(cls, call: Prepared, tensors: Tensors) -> "_Experts":
        """From the operands after x and the routing, in their order."""
        w_up, w_down, w_gate, b_up, b_down, b_gate = tensors
        layout = call.extras["gate_and_up"]
        if call.extras["transposed"]:
            w_up, w_down, w_gate = (None if each is None else each.mT for each in (w_up, w_down, w_gate))
        if layout != "separate":
            w_up, w_gate = _halves(w_up, layout)
            b_up, b_gate = _halves(b_up, layout)
        return cls(w_up, w_down, w_gate, b_up, b_down, b_gate)


def _halves(merged: Tensor | None, layout: str) -> tuple[Tensor | None, Tensor | None]:
    """(up, gate) of a merged weight ``[E, 2 N, K]`` or bias ``[E, 2 N]``."""
    if merged is None:
        return None, None
    if layout == "interleaved":
        return merged[:, 1::2], merged[:, ::2]
    units = merged.shape[1] // 2
    return merged[:, units:], merged[:, :units]


def forward(call: Prepared, operands: Tensors, saving: bool) -> tuple[Tensor, Tensors]:
    """y ``[M, K]``; with ``saving`` the sorted rows, in one tensor, and the pre-activations unless recomputed."""
    x, index, scores, *rest = operands
    problem, plan, ready = call.problem, call.plan, call.ready
    experts = _Experts.of(call, rest)
    packed, rows = kernels.sort(index, problem.E, problem.top_k, problem.block, ready)
    h, z, g = _hidden(call, x, experts, rows, keep=saving and not problem.recompute)
    ys = kernels.product(
        [(h, experts.w_down)], experts.b_down, rows, problem.input_precision, tiles=plan.product_tiles,
        pipeline=plan.product_pipeline, ready=ready.setdefault("down", {}),
    )  # fmt: skip
    y = kernels.combine(ys, scores, rows, ready=ready)
    return y, (packed, z, g) if saving else (None, None, None)


def _hidden(
    call: Prepared, x: Tensor, experts: _Experts, rows: SortedRows, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """H of x ``[M, K]``; with ``keep`` also Z, and with a gate G."""
    plan, gathered = call.plan, call.plan.hidden_pipeline is not None
    if gathered:
        # TMA loads rows of an expert that are adjacent in memory.
        x, _ = kernels.spread(x, None, rows, ready=call.ready.setdefault("x", {}))
    return kernels.hidden(
        x, experts.w_up, experts.w_gate, experts.b_up, experts.b_gate, rows, keep, call.details,
        gathered=gathered, tiles=plan.hidden_tiles, pipeline=plan.hidden_pipeline, ready=call.ready,
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
    experts = _Experts.of(call, rest)
    rows = kernels.rows_of(packed, problem.slots, problem.E, problem.block, problem.top_k)
    found: list[Tensor | None] = [None] * len(operands)

    def allocate(*positions: int) -> _Experts:
        """Room for the wanted ones of these gradients, just before they are computed: then other memory is free."""
        for position in positions:
            if wanted[position]:
                found[position] = operands[position].new_empty(operands[position].shape)
        among = range(_W_UP, len(found))
        return _Experts.of(call, [found[position] if position in positions else None for position in among])

    # The rows of dy, and db_down = Σ w dys.
    dys, row_weights = kernels.spread(dy, scores, rows, ready=ready.setdefault("dy", {}))
    assert row_weights is not None
    if (db_down := allocate(B_DOWN).b_down) is not None:
        kernels.expert_sums(dys, row_weights, rows, db_down, ready=ready, name="down")
    through_hidden = any(wanted[position] for position in _THROUGH_HIDDEN)
    if not (through_hidden or wanted[SCORES] or wanted[_W_DOWN]):
        return found

    # dZ and dG; w ⊙ H for dW_down; and dH' ⊙ H, summed over some columns each, for dw.
    if z is None:
        _, z, g = _hidden(call, x, experts, rows, keep=True)
        in_place = True
    dz, dg, weighted, partials = kernels.hidden_gradient(
        dys, experts.w_down, z, g, row_weights, rows, wanted[_W_DOWN], wanted[SCORES], call.details,
        in_place=in_place, tiles=plan.hidden_gradient_tiles, pipeline=plan.hidden_gradient_pipeline, ready=ready,
    )  # fmt: skip
    del z, g
    if partials is not None:
        found[SCORES] = kernels.score_gradient(partials, index, dy, experts.b_down, rows, scores.dtype, ready=ready)

    # dW_down = dysᵀ (w ⊙ H).
    order = None
    if plan.weight_gradient_pipeline is not None and any(wanted[_W_UP : _W_GATE + 1]):
        order = kernels.longest_first(rows.starts)
    if (dw_down := allocate(_W_DOWN).w_down) is not None:
        assert weighted is not None
        _weight_gradient(call, dys, weighted, rows, dw_down, order, "down")
    # Free them before the gradient of the rows of x and the rows themselves are allocated.
    del dys, weighted

    # db_up = Σ dZ, db_gate = Σ dG.
    biases = allocate(B_UP, B_GATE)
    if biases.b_up is not None:
        kernels.expert_sums(dz, None, rows, biases.b_up, ready=ready, name="up")
    if biases.b_gate is not None and dg is not None:
        kernels.expert_sums(dg, None, rows, biases.b_gate, ready=ready, name="gate")

    # dxs = dZ W_up + dG W_gate, and dx sums each token's rows.
    if wanted[_X]:
        pairs = [(dz, experts.w_up.mT)] + ([] if dg is None else [(dg, experts.w_gate.mT)])
        dxs = kernels.product(
            pairs, None, rows, problem.input_precision, tiles=plan.product_tiles, pipeline=plan.product_pipeline,
            ready=ready.setdefault("data gradient", {}),
        )  # fmt: skip
        found[_X] = kernels.combine(dxs, None, rows, ready=ready)
        del dxs

    # dW_up = dZᵀ xs, dW_gate = dGᵀ xs.
    if wanted[_W_UP] or wanted[_W_GATE]:
        xs, _ = kernels.spread(x, None, rows, ready=ready.setdefault("x", {}))
        weights = allocate(_W_UP, _W_GATE)
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
