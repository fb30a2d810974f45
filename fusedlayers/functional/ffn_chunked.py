"""The chunked path of the FFN, on rows ``[M, *]``: the hidden is in memory in parts only, forward and backward.

A part is computed by the kernels of the epilogue path where the plan has their tiles, else by torch's operations.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue as kernels
from ..kernels.dropout import Dropout
from ..kernels.gemm_gemm import Arithmetic
from ..planning import ChunkPass, Plan
from .sums import accumulated, summed_rows

Gradients = list[Tensor | None]


class Weights(NamedTuple):
    """The weights and biases of an FFN, or those of a group of its hidden units; ``first`` is the group's first one."""

    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None
    first: int = 0

    def group(self, units: slice) -> "Weights":
        """Those of some hidden units."""
        b_up, w_gate, b_gate = (None if t is None else t[units] for t in (self.b_up, self.w_gate, self.b_gate))
        return Weights(self.w_up[units], self.w_down[:, units], b_up, self.b_down, w_gate, b_gate, units.start)


def forward(
    x: Tensor, weights: Weights, residual: Tensor | None, seed: Tensor | None, arithmetic: Arithmetic, plan: Plan
) -> Tensor:
    """y ``[M, O]``."""
    assert plan.chunks is not None
    y = x.new_empty(x.shape[0], weights.w_down.shape[0])
    for rows in _ranges(x.shape[0], plan.chunks.rows):
        hidden = _hidden(x[rows], weights, rows.start, seed, arithmetic, plan)
        if weights.b_down is None:
            torch.mm(hidden, weights.w_down.T, out=y[rows])
        else:
            torch.addmm(weights.b_down, hidden, weights.w_down.T, out=y[rows])
        # Before the next chunk has one.
        del hidden
        if residual is not None:
            y[rows] += residual[rows]
    return y


def _hidden(
    x: Tensor, weights: Weights, first_row: int, seed: Tensor | None, arithmetic: Arithmetic, plan: Plan
) -> Tensor:
    if plan.epilogue is not None:
        tiles = plan.epilogue
        return kernels.hidden(
            x, weights.w_up, weights.b_up, weights.w_gate, weights.b_gate, False, arithmetic.activation,
            arithmetic.accuracy, arithmetic.input_precision, tiles.hidden_tiles, tiles.hidden_pipeline,
            Dropout(seed, arithmetic.dropout_p, (first_row, weights.first)),
        )[0]  # fmt: skip
    return _through_torch(x, weights, first_row, seed, arithmetic)[0]


def _through_torch(
    x: Tensor, weights: Weights, first_row: int, seed: Tensor | None, arithmetic: Arithmetic, graph: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The hidden of some rows and units, and its pre-activations, from which autograd follows it with ``graph``."""
    pre_activations = [torch.nn.functional.linear(x, weights.w_up, weights.b_up)]
    if weights.w_gate is not None:
        pre_activations.append(torch.nn.functional.linear(x, weights.w_gate, weights.b_gate))
    with torch.set_grad_enabled(graph):
        if graph:
            pre_activations = [z.requires_grad_() for z in pre_activations]
        hidden = reference.hidden(*pre_activations, activation=arithmetic.activation)
        place = (first_row, weights.first)
        return reference.dropped(hidden, arithmetic.dropout_p, seed, place), pre_activations


@torch.no_grad()
def gradients(
    x: Tensor, weights: Weights, seed: Tensor | None, wanted: tuple[bool, ...], dy: Tensor,
    arithmetic: Arithmetic, plan: Plan,
) -> Gradients:  # fmt: skip
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate); not that of b_down.

    Each is written once, rounded once, but dx, which is rounded once for each group of hidden units.
    """
    assert plan.chunks is not None
    operands = (x, weights.w_up, weights.w_down, weights.b_up, None, weights.w_gate, weights.b_gate)
    found: Gradients = [
        None if tensor is None or not want else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, want in zip(operands, wanted, strict=True)
    ]
    call = _Call(x, dy, seed, arithmetic, plan)
    for step in plan.chunks.passes:
        for units in _ranges(weights.w_up.shape[0], step.columns):
            _one_group(call, weights.group(units), step, found)
    return found


class _Call(NamedTuple):
    """What all parts of a backward pass share."""

    x: Tensor
    dy: Tensor
    seed: Tensor | None
    arithmetic: Arithmetic
    plan: Plan


def _one_group(call: _Call, weights: Weights, step: ChunkPass, found: Gradients) -> None:
    """Fills those of ``found`` that the pass yields, with the part of dx that comes through these hidden units."""
    units = slice(weights.first, weights.first + weights.w_up.shape[0])
    dx = found[0] if step.data else None
    dw_up, dw_down, db_up, _, dw_gate, db_gate = found[1:] if step.weights else [None] * 6
    whole = step.rows >= call.x.shape[0]
    sums = _Sums(
        (_Sum(dw_up, units, whole), _Sum(dw_gate, units, whole)),
        (_Sum(db_up, units, False), _Sum(db_gate, units, False)),
        _Sum(dw_down, (slice(None), units), whole),
    )
    for rows in _ranges(call.x.shape[0], step.rows):
        _one_chunk(call, weights, rows, None if dx is None else dx[rows], sums)
    for each in (*sums.of_inputs, *sums.of_rows, sums.of_down):
        each.store()


def _one_chunk(call: _Call, weights: Weights, rows: slice, dx: Tensor | None, sums: "_Sums") -> None:
    # A function of its own, so that nothing of a chunk is left when the next one begins.
    x, dy = call.x[rows], call.dy[rows]
    biases = any(each.wanted for each in sums.of_rows)
    through = dx is not None or biases or any(each.wanted for each in sums.of_inputs)
    hidden, dz, of_rows = _part(call, x, dy, weights, rows.start, through, biases)
    sums.of_down.add_product(dy, hidden)
    for place, (d_pre, db) in enumerate(zip(dz, of_rows, strict=True)):
        sums.of_inputs[place].add_product(d_pre, x)
        sums.of_rows[place].add(db)
        if dx is not None:
            weight = weights.w_gate if place else weights.w_up
            assert weight is not None
            torch.addmm(dx, d_pre, weight, beta=1 if place or weights.first else 0, out=dx)


def _part(
    call: _Call, x: Tensor, dy: Tensor, weights: Weights, first_row: int, through: bool, biases: bool
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The hidden; if gradients go ``through`` its pre-activations, those of these, and their sums for ``biases``."""
    arithmetic, plan = call.arithmetic, call.plan
    if plan.epilogue is not None:
        tiles, gradient = plan.epilogue, plan.epilogue.gradient
        dropout = Dropout(call.seed, arithmetic.dropout_p, (first_row, weights.first))
        hidden, z, z_gate = kernels.hidden(
            x, weights.w_up, weights.b_up, weights.w_gate, weights.b_gate, through, arithmetic.activation,
            arithmetic.accuracy, arithmetic.input_precision, tiles.hidden_tiles, tiles.hidden_pipeline, dropout,
        )  # fmt: skip
        if z is None:
            return hidden, [], []
        assert gradient is not None
        assert gradient.tiles is not None
        found = kernels.hidden_gradient(
            dy, weights.w_down, z, z_gate, biases, gradient.row_tiles, arithmetic.activation, arithmetic.accuracy,
            arithmetic.input_precision, gradient.tiles, gradient.pipeline, in_place=True, sums_dtype=torch.float32,
            dropout=dropout,
        )  # fmt: skip
        if found.dz_gate is None:
            return hidden, [found.dz], [found.db_up]
        return hidden, [found.dz, found.dz_gate], [found.db_up, found.db_gate]
    hidden, pre_activations = _through_torch(x, weights, first_row, call.seed, arithmetic, graph=through)
    if not through:
        return hidden, [], []
    dz = torch.autograd.grad(hidden, pre_activations, dy @ weights.w_down)
    sums = [summed_rows(each) if biases else None for each in dz]
    return hidden.detach(), list(dz), sums


class _Sum:
    """The ``part`` of a gradient that one group yields, summed over chunks of tokens in at least float32, rounded once.

    ``whole`` says that there is one chunk: the gradient itself takes the product then.
    """

    def __init__(self, gradient: Tensor | None, part: slice | tuple[slice, slice], whole: bool) -> None:
        self.wanted = gradient is not None
        self.gradient = self.total = None if gradient is None else gradient[part]
        self.empty = True
        if self.gradient is not None and not whole and self.gradient.dtype != accumulated(self.gradient.dtype):
            self.total = torch.empty(
                self.gradient.shape, dtype=accumulated(self.gradient.dtype), device=self.gradient.device
            )

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """``leftᵀ @ right``; it is not rounded to the operands' dtype on the way."""
        total = self.total
        if total is None:
            return
        beta, self.empty = 0 if self.empty else 1, False
        if left.dtype == total.dtype:
            torch.addmm(total, left.T, right, beta=beta, out=total)
        elif left.is_cuda:
            torch.addmm(total, left.T, right, beta=beta, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left.T.to(total.dtype), right.to(total.dtype), beta=beta, out=total)

    def add(self, term: Tensor | None) -> None:
        """A sum over the rows of a chunk."""
        if self.total is not None and term is not None:
            if self.empty:
                self.total.copy_(term)
            else:
                self.total += term
            self.empty = False

    def store(self) -> None:
        """Rounds the sum into the gradient."""
        if self.gradient is not None and self.total is not None and self.total is not self.gradient:
            self.gradient.copy_(self.total)


class _Sums(NamedTuple):
    """The sums of one group: those of the weights and biases before the activation, up and gate, and of w_down."""

    of_inputs: tuple[_Sum, _Sum]
    of_rows: tuple[_Sum, _Sum]
    of_down: _Sum


def _ranges(size: int, step: int) -> Iterator[slice]:
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))
