"""The chunked path of the FFN, on rows ``[M, *]``: the hidden is in memory in parts only, forward and backward.

A part is computed by the kernels of the epilogue path where the plan has their tiles, else by torch's operations. The
backward pass computes the pre-activations of a chunk, and the hidden in slices of it, because only the gradient of
w_down needs it; the gradients of the pre-activations take their place, so that each of the other products has one sum.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...kernels import gemm_epilogue as kernels
from ...kernels.dropout import Dropout
from ...kernels.gemm_gemm import Arithmetic
from ...planning import ChunkPass, Plan
from ..operands import rows as rows_of
from ..operation import Tensors
from ..prepared import Prepared
from ..sums import accumulated, add_product, summed_rows

Gradients = list[Tensor | None]
EVERY = slice(None)


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
        first = self.first + units.start
        return Weights(self.w_up[units], self.w_down[:, units], b_up, self.b_down, w_gate, b_gate, first)


Slices = list[tuple[slice, Weights]]


def forward(call: Prepared, operands: Tensors) -> Tensor:
    """y ``[M, O]`` of (x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual, seed)."""
    x, *given, residual, seed = operands
    x, weights = rows_of(x), Weights(*given)
    residual = None if residual is None else rows_of(residual)
    plan, arithmetic = call.plan, call.details
    y = x.new_empty(x.shape[0], weights.w_down.shape[0])
    for rows in _ranges(x.shape[0], plan.chunks.rows):
        hidden = _hidden(x[rows], weights, rows.start, seed, arithmetic, plan)
        if weights.b_down is None:
            torch.mm(hidden, weights.w_down.T, out=y[rows])
        else:
            torch.addmm(weights.b_down, hidden, weights.w_down.T, out=y[rows])
        # Free this chunk's hidden before the next chunk allocates its own.
        del hidden
        if residual is not None:
            y[rows] += residual[rows]
    return y


def _hidden(
    x: Tensor, weights: Weights, first_row: int, seed: Tensor | None, arithmetic: Arithmetic, plan: Plan
) -> Tensor:
    place = (first_row, weights.first)
    if plan.epilogue is not None:
        tiles = plan.epilogue
        return kernels.hidden(
            x, weights.w_up, weights.b_up, weights.w_gate, weights.b_gate, False, arithmetic.activation,
            arithmetic.accuracy, arithmetic.input_precision, tiles.hidden_tiles, tiles.hidden_pipeline,
            Dropout(seed, arithmetic.dropout_p, place),
        )[0]  # fmt: skip
    hidden = reference.hidden(*_pre_activations(x, weights), activation=arithmetic.activation)
    return reference.dropped(hidden, arithmetic.dropout_p, seed, place)


@torch.no_grad()
def gradients(call: Prepared, operands: Tensors, wanted: Sequence[bool], dy: Tensor) -> Gradients:
    """The wanted gradients of (x, w_up, w_down, b_up, b_down, w_gate, b_gate); not that of b_down.

    Each is rounded once, but dx where it is added up over groups of hidden units and not carried by a kernel: that is
    rounded once for each group, gated twice.
    """
    x, w_up, w_down, b_up, _, w_gate, b_gate, _, seed = operands
    x, weights = rows_of(x), Weights(w_up, w_down, b_up, None, w_gate, b_gate)
    plan = call.plan
    found: Gradients = [
        None if tensor is None or not want else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor, want in zip((x, *weights[:6]), wanted[:7], strict=True)
    ]
    step_call = _Call(x, dy, seed, call.details, plan)
    hidden_units = weights.w_up.shape[0]
    for step in plan.chunks.passes:
        dx = found[0] if step.data else None
        rest = x.new_empty(x.shape[0], -(-x.shape[1] // 2), dtype=torch.int8) if step.carried else None
        for units in _ranges(hidden_units, step.columns):
            data = None if dx is None else _DataSum(dx, rest, units.start == 0, units.stop == hidden_units)
            _one_group(step_call, weights.group(units), step, data, found)
    return found


class _Call(NamedTuple):
    """What all parts of a backward pass share."""

    x: Tensor
    dy: Tensor
    seed: Tensor | None
    arithmetic: Arithmetic
    plan: Plan


def _one_group(call: _Call, weights: Weights, step: ChunkPass, data: "_DataSum | None", found: Gradients) -> None:
    """Fills those of ``found`` that the pass yields, and adds what comes through these hidden units to dx."""
    size = weights.w_up.shape[0]
    units = slice(weights.first, weights.first + size)
    dw_up, dw_down, db_up, _, dw_gate, db_gate = found[1:] if step.weights else [None] * 6
    whole = step.rows >= call.x.shape[0]
    sums = _Sums(
        (_Sum(dw_up, units, whole), _Sum(dw_gate, units, whole)),
        (_Sum(db_up, units, whole), _Sum(db_gate, units, whole)),
        _Sum(dw_down, (EVERY, units), whole),
    )
    slices: Slices = [(EVERY, weights)]
    if step.slice_columns < size:
        slices = [(each, weights.group(each)) for each in _ranges(size, step.slice_columns)]
    for rows in _ranges(call.x.shape[0], step.rows):
        _one_chunk(call, weights, slices, rows, data, sums)
    for each in (*sums.of_inputs, *sums.of_rows, sums.of_down):
        each.store()


def _one_chunk(
    call: _Call, weights: Weights, slices: Slices, rows: slice, data: "_DataSum | None", sums: "_Sums"
) -> None:
    # A function of its own, so that nothing of a chunk is left when the next one begins.
    x, dy = call.x[rows], call.dy[rows]
    through = data is not None or any(each.wanted for each in (*sums.of_rows, *sums.of_inputs))
    # Together they give dz, of which every product with it needs all; the hidden is needed by one, slice by slice.
    dz = _pre_activations(x, weights) if through else []
    for units, part in slices:
        if through:
            _one_slice(call, dy, part, [_columns(each, units) for each in dz], rows, units, sums)
        elif sums.of_down.wanted:
            hidden = _hidden(x, part, rows.start, call.seed, call.arithmetic, call.plan)
            sums.of_down.add_product(dy, hidden, rows, units)
    for place, d_pre in enumerate(dz):
        sums.of_inputs[place].add_product(d_pre, x, rows)
    if data is not None:
        data.add_products(call, dz, weights, rows)


def _pre_activations(x: Tensor, weights: Weights) -> list[Tensor]:
    found = []
    for weight, bias in ((weights.w_up, weights.b_up), (weights.w_gate, weights.b_gate)):
        if weight is not None:
            found.append(torch.nn.functional.linear(x, weight, bias))
    return found


def _one_slice(
    call: _Call, dy: Tensor, weights: Weights, z: list[Tensor], rows: slice, units: slice, sums: "_Sums"
) -> None:
    """Puts the gradients of the pre-activations ``z`` in their place, and adds up what else comes of them."""
    arithmetic, plan = call.arithmetic, call.plan
    biases, place = any(each.wanted for each in sums.of_rows), (rows.start, weights.first)
    if plan.epilogue is not None:
        gradient = plan.epilogue.gradient
        assert gradient is not None
        assert gradient.tiles is not None
        terms = [total.place(rows, units, each) for total, each in zip(sums.of_rows, z, strict=False)] if biases else []
        found = kernels.hidden_gradient(
            dy, weights.w_down, z[0], z[1] if len(z) > 1 else None, biases, gradient.row_tiles, arithmetic.activation,
            arithmetic.accuracy, arithmetic.input_precision, gradient.tiles, gradient.pipeline,
            keep_hidden=sums.of_down.wanted, in_place=True, sums_into=terms,
            dropout=Dropout(call.seed, arithmetic.dropout_p, place),
        )  # fmt: skip
        if found.hidden is not None:
            sums.of_down.add_product(dy, found.hidden, rows, units)
    else:
        with torch.enable_grad():
            followed = [each.detach().requires_grad_() for each in z]
            hidden = reference.hidden(*followed, activation=arithmetic.activation)
            hidden = reference.dropped(hidden, arithmetic.dropout_p, call.seed, place)
        gradients = torch.autograd.grad(hidden, followed, dy @ weights.w_down)
        terms = [summed_rows(each) for each in gradients] if biases else []
        # Before the pre-activations are replaced: without an activation they are the hidden.
        sums.of_down.add_product(dy, hidden.detach(), rows, units)
        for each, d_pre in zip(z, gradients, strict=True):
            each.copy_(d_pre)
    for total, term in zip(sums.of_rows, terms, strict=False):
        total.add(term, rows, units)


class _DataSum(NamedTuple):
    """dx as the sum of products of each group of hidden units, the ``first`` and the ``last`` of which are known.

    With ``rest``, a kernel carries what is beyond its bits from group to group; else each product is rounded to it.
    """

    gradient: Tensor
    rest: Tensor | None
    first: bool
    last: bool

    def add_products(self, call: _Call, dz: list[Tensor], weights: Weights, rows: slice) -> None:
        """Those of one chunk: of the gradients of its pre-activations with the weights of the group."""
        dx = self.gradient[rows]
        matrices = [weight for weight in (weights.w_up, weights.w_gate) if weight is not None]
        terms = list(zip(dz, matrices, strict=True))
        if self.rest is None:
            for place, (d_pre, weight) in enumerate(terms):
                torch.addmm(dx, d_pre, weight, beta=0 if self.first and not place else 1, out=dx)
            return
        tiles = call.plan.epilogue
        assert tiles is not None
        assert tiles.data_gradient_tiles is not None
        kernels.data_gradient(
            terms, dx, self.rest[rows], self.first, self.last, call.arithmetic.input_precision,
            tiles.data_gradient_tiles, tiles.data_gradient_pipeline,
        )  # fmt: skip


class _Sum:
    """The ``part`` of a gradient that one group yields, summed over chunks of tokens in at least float32, rounded once.

    The first chunk begins it. ``whole`` says that there is one chunk: the gradient itself takes the product then.
    """

    def __init__(self, gradient: Tensor | None, part: slice | tuple[slice, slice], whole: bool) -> None:
        self.wanted = gradient is not None
        self.gradient = self.total = None if gradient is None else gradient[part]
        if self.gradient is not None and not whole and self.gradient.dtype != accumulated(self.gradient.dtype):
            self.total = torch.empty(
                self.gradient.shape, dtype=accumulated(self.gradient.dtype), device=self.gradient.device
            )

    def add_product(self, left: Tensor, right: Tensor, rows: slice, units: slice = EVERY) -> None:
        """``leftᵀ @ right`` of a chunk's rows to some columns; it is not rounded to the operands' dtype on the way."""
        if self.total is None:
            return
        add_product(_columns(self.total, units), left, right, first=not rows.start)

    def place(self, rows: slice, units: slice, like: Tensor) -> Tensor:
        """Where a kernel may write a sum over the rows of a chunk before it is added: of the first one, the total."""
        if self.total is not None and not rows.start:
            return self.total[units]
        return torch.empty(like.shape[1], dtype=accumulated(like.dtype), device=like.device)

    def add(self, term: Tensor, rows: slice, units: slice) -> None:
        """A sum over the rows of a chunk, to some elements."""
        if self.total is None:
            return
        total = self.total[units]
        if rows.start:
            total += term
        elif term.data_ptr() != total.data_ptr():
            total.copy_(term)

    def store(self) -> None:
        """Rounds the sum into the gradient."""
        if self.gradient is not None and self.total is not None and self.total is not self.gradient:
            self.gradient.copy_(self.total)


class _Sums(NamedTuple):
    """The sums of one group: those of the weights and biases before the activation, up and gate, and of w_down."""

    of_inputs: tuple[_Sum, _Sum]
    of_rows: tuple[_Sum, _Sum]
    of_down: _Sum


def _columns(matrix: Tensor, units: slice) -> Tensor:
    """Those columns; a view of all of them costs the host time for nothing."""
    return matrix if units is EVERY else matrix[:, units]


def _ranges(size: int, step: int) -> Iterator[slice]:
    for first in range(0, size, step):
        yield slice(first, min(first + step, size))
