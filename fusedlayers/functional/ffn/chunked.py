"""The chunked path of the FFN, on rows ``[M, *]``: the hidden is in memory in parts only, forward and backward.

A part is computed by the kernels of the epilogue path where the plan has their tiles, else by torch's operations. The
forward pass takes some tokens at a time. The backward pass takes all tokens for one group of hidden units at a time: it
recomputes their pre-activations; then, for some units of the group at a time, it computes the hidden and overwrites the
pre-activations with their gradients.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...kernels import gemm_epilogue as kernels
from ...kernels.dropout import Dropout
from ...kernels.torch_internals import autograd_in_reach
from ..operands import rows as rows_of
from ..operation import Tensors
from ..prepared import Prepared
from ..sums import accumulated, add_product, summed_rows

Gradients = list[Tensor | None]


class Weights(NamedTuple):
    """The weights and biases of an FFN, or of a group of its hidden units, which begins with unit ``first``."""

    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None
    first: int = 0

    def group(self, units: slice) -> "Weights":
        """The parts that belong to some hidden units."""
        b_up, w_gate, b_gate = (None if t is None else t[units] for t in (self.b_up, self.w_gate, self.b_gate))
        return Weights(self.w_up[units], self.w_down[:, units], b_up, w_gate, b_gate, units.start)


def forward(call: Prepared, operands: Tensors) -> Tensor:
    """y ``[M, O]`` of (x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed)."""
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed = operands
    x, weights = rows_of(x), Weights(w_up, w_down, b_up, w_gate, b_gate)
    residual = None if residual is None else rows_of(residual)
    y = x.new_empty(x.shape[0], w_down.shape[0])
    for rows in _ranges(x.shape[0], call.plan.chunks.rows):
        hidden = _hidden(call, x[rows], weights, rows.start, seed)
        if b_down is None:
            torch.mm(hidden, w_down.T, out=y[rows])
        else:
            torch.addmm(b_down, hidden, w_down.T, out=y[rows])
        # Free this chunk's hidden before the next chunk allocates its own.
        del hidden
        if residual is not None:
            y[rows] += residual[rows]
    return y


def _hidden(call: Prepared, x: Tensor, weights: Weights, first_row: int, seed: Tensor | None) -> Tensor:
    arithmetic, place = call.details, (first_row, weights.first)
    tiles = call.plan.epilogue
    if tiles is not None:
        return kernels.hidden(
            x, weights.w_up, weights.b_up, weights.w_gate, weights.b_gate, False, arithmetic, tiles.hidden_tiles,
            tiles.hidden_pipeline, Dropout(seed, arithmetic.dropout_p, place), _ready(call, *place, x.shape[0]),
        )[0]  # fmt: skip
    hidden = reference.hidden(*_pre_activations(x, weights), activation=arithmetic.activation)
    return reference.dropped(hidden, arithmetic.dropout_p, seed, place)


def _ready(call: Prepared, *part: int) -> dict[Any, Any]:
    """The prepared launches of one part of a call; all executions of a prepared call have the same parts."""
    return call.ready.setdefault(("part", *part), {})


@torch.no_grad()
def gradients(call: Prepared, operands: Tensors, wanted: Sequence[bool], dy: Tensor) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate) but that of b_down, each rounded once."""
    x, w_up, w_down, b_up, _, w_gate, b_gate, _, seed = operands
    x, weights = rows_of(x), Weights(w_up, w_down, b_up, w_gate, b_gate)
    found: Gradients = [
        None if tensor is None or not want else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor, want in zip((x, w_up, w_down, b_up, None, w_gate, b_gate), wanted[:7], strict=True)
    ]
    dx, dw_up, _, db_up, _, _, db_gate = found
    total, columns = None if dx is None else _sum_of(dx), call.plan.chunks.columns
    if dw_up is None and (db_up is not None or db_gate is not None):
        # Half as many units at a time: the partial sums, planned into the memory of dw_up, need memory of their own.
        columns = math.ceil(columns / 16) * 8
    for units in _ranges(w_up.shape[0], columns):
        _one_group(call, x, dy, weights.group(units), _of_units(found, units), total, seed)
    return found


def _of_units(found: Gradients, units: slice) -> Gradients:
    """The parts of the gradients that belong to some hidden units; all of dx."""
    dx, dw_up, dw_down, db_up, db_down, dw_gate, db_gate = found
    of_rows = [None if each is None else each[units] for each in (dw_up, db_up, dw_gate, db_gate)]
    return [dx, of_rows[0], None if dw_down is None else dw_down[:, units], of_rows[1], db_down, *of_rows[2:]]


def _one_group(
    call: Prepared, x: Tensor, dy: Tensor, weights: Weights, found: Gradients, total: Tensor | None, seed: Tensor | None
) -> None:
    """Fills the gradients of a group of hidden units, and adds the group's share to dx's total.

    A function of its own, so that a group's temporaries are freed before the next one begins.
    """
    dx, dw_up, dw_down, db_up, _, dw_gate, db_gate = found
    dz, chunks = _pre_activations(x, weights), call.plan.chunks
    # dx and dw_up are written last: until then the hidden and the partial sums may use their memory.
    place = dx.view(-1) if dx is not None and chunks.hidden_in_dx else None
    room = None if dw_up is None or call.plan.epilogue is None else _as_float32(dw_up)
    for units in _ranges(weights.w_up.shape[0], chunks.hidden_columns):
        biases = [None if gradient is None else gradient[units] for gradient in (db_up, db_gate)]
        gradient = None if dw_down is None else dw_down[:, units]
        part = _Part(dy, weights.w_down[:, units], [each[:, units] for each in dz], weights.first + units.start)
        _through_hidden(call, part, gradient, biases, place, room, seed)
    for d_pre, gradient in zip(dz, (dw_up, dw_gate), strict=False):
        if gradient is not None:
            torch.mm(d_pre.T, x, out=gradient)
    if dx is not None and total is not None:
        _add_to_dx(call, dz, weights, dx, total)


class _Part(NamedTuple):
    """Hidden units from ``first`` on: dy, their columns of w_down, and z, which its gradient overwrites."""

    dy: Tensor
    w_down: Tensor
    z: list[Tensor]
    first: int


def _through_hidden(
    call: Prepared,
    part: _Part,
    dw_down: Tensor | None,
    biases: list[Tensor | None],
    place: Tensor | None,
    room: Tensor | None,
    seed: Tensor | None,
) -> None:
    """Overwrites the pre-activations of some hidden units with their gradients; fills dw_down and ``biases``.

    The hidden uses the memory of the vector ``place`` if given, partial sums that of ``room`` if it is large enough.
    """
    hidden, (rows, columns) = None, part.z[0].shape
    if dw_down is not None:
        hidden = part.dy.new_empty(rows, columns) if place is None else place[: rows * columns].view(rows, columns)
    _hidden_gradient(call, part, hidden, biases, room, seed)
    if dw_down is not None and hidden is not None:
        torch.mm(part.dy.T, hidden, out=dw_down)


def _as_float32(memory: Tensor) -> Tensor:
    """A vector of float32 in the memory of a contiguous tensor of 16 or 32 bits."""
    share = 4 // memory.element_size()
    vector = memory.view(-1)
    vector = vector[vector.storage_offset() % share :]
    return vector[: vector.shape[0] // share * share].view(torch.float32)


def _sum_of(gradient: Tensor) -> Tensor:
    """The accumulator of a gradient: itself, if its dtype is wide enough."""
    wide = accumulated(gradient.dtype)
    return gradient if gradient.dtype == wide else torch.empty(gradient.shape, dtype=wide, device=gradient.device)


def _pre_activations(x: Tensor, weights: Weights) -> list[Tensor]:
    pairs = ((weights.w_up, weights.b_up), (weights.w_gate, weights.b_gate))
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in pairs if weight is not None]


def _hidden_gradient(
    call: Prepared,
    part: _Part,
    hidden: Tensor | None,
    biases: list[Tensor | None],
    room: Tensor | None,
    seed: Tensor | None,
) -> None:
    """Overwrites the pre-activations with their gradients, and fills the hidden and ``biases`` if given."""
    (dy, w_down, z, first), arithmetic, tiles = part, call.details, call.plan.epilogue
    if tiles is not None:
        gradient, summed = tiles.gradient, any(bias is not None for bias in biases)
        # The kernel writes the sums of both biases, even if one of them is frozen.
        sums = [each.new_empty(each.shape[1]) if b is None else b for b, each in zip(biases, z, strict=False) if summed]
        kernels.hidden_gradient(
            dy, w_down, z[0], z[1] if len(z) > 1 else None, summed, gradient.row_tiles, arithmetic, gradient.tiles,
            gradient.pipeline, in_place=True, sums_into=sums, partials_into=room, hidden_into=hidden,
            dropout=Dropout(seed, arithmetic.dropout_p, (0, first)), ready=_ready(call, first, z[0].shape[1]),
        )  # fmt: skip
        return
    totals = [torch.zeros(each.shape[1], dtype=accumulated(each.dtype), device=each.device) for each in z]
    for rows in _ranges(dy.shape[0], call.plan.chunks.group_rows):
        _through_torch(call, part, hidden, totals, rows, seed)
    for bias, total in zip(biases, totals, strict=False):
        if bias is not None:
            bias.copy_(total)


def _through_torch(
    call: Prepared, part: _Part, hidden: Tensor | None, totals: list[Tensor], rows: slice, seed: Tensor | None
) -> None:
    """:func:`_hidden_gradient` of some rows by torch; its temporaries are freed before the next rows."""
    (dy, w_down, z, first), arithmetic = part, call.details
    with autograd_in_reach():
        with torch.enable_grad():
            followed = [each[rows].detach().requires_grad_() for each in z]
            values = reference.hidden(*followed, activation=arithmetic.activation)
            values = reference.dropped(values, arithmetic.dropout_p, seed, (rows.start, first))
        found = torch.autograd.grad(values, followed, dy[rows] @ w_down)
    # Before the pre-activations are overwritten: without an activation they are the hidden.
    if hidden is not None:
        hidden[rows] = values.detach()
    for each, d_pre, total in zip(z, found, totals, strict=True):
        each[rows] = d_pre
        total += summed_rows(d_pre)


def _add_to_dx(call: Prepared, dz: list[Tensor], weights: Weights, dx: Tensor, total: Tensor) -> None:
    """Adds the share of these hidden units to the total; the last group writes dx."""
    matrices = [weight for weight in (weights.w_up, weights.w_gate) if weight is not None]
    terms = list(zip(dz, matrices, strict=True))
    first, last = weights.first == 0, weights.first + weights.w_up.shape[0] == call.problem.N
    pipeline = None if call.plan.epilogue is None else call.plan.epilogue.data_gradient_pipeline
    ready = _ready(call, weights.first, weights.w_up.shape[0])
    if pipeline is not None and kernels.data_gradient(terms, dx, total, first, last, pipeline, ready):
        return
    for place, (d_pre, weight) in enumerate(terms):
        add_product(total, d_pre.T, weight, first=first and not place)
    if last and total is not dx:
        dx.copy_(total)


def _ranges(size: int, step: int) -> Iterator[slice]:
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))
