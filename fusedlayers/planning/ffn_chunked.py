"""The chunked path of an FFN: which part of the hidden is in memory at once, so that a bound of bytes is kept.

The forward pass takes some tokens at a time. The backward pass takes groups of hidden units, all tokens at once: the
pre-activations of a group, which their gradients replace, and its hidden. So the weight gradients of a group are
complete, and rounded once, before the next one begins; dx is summed over the groups in float32. Until it is rounded
into its own tensor at the end, that tensor is free: the hidden of as many units at a time as fit lies there, so that
groups are few, and the sum is seldom read and written. The gradient of w_up is not there either until a group is done:
partial sums of the gradients of biases lie in its memory.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..kernels.tuning import CONSUMER_ROWS, epilogue_tiles
from .devices import Device
from .measured import fitted

# A call with recompute=True may take this many times the bytes of x as temporary memory, or this many bytes if x is
# small.
WORKSPACE_COPIES, LEAST_WORKSPACE = 8, 256 * 2**20
# Narrower rows of x count as this wide: otherwise not one hidden unit would fit beside the sum of dx.
LEAST_COLUMNS = 8
# Chunks of tokens and groups of units are multiples of these, for whole tiles and aligned addresses: of the first step
# that is not larger.
ROW_STEP = 256
COLUMN_STEPS = (128, 8, 1)

# Hidden-sized tensors that torch's operations have in memory at once, by whether there is a gate: for the activation
# that needs most of them, relu2. Dropout adds the mask and two products with it.
FORWARD_COPIES = {False: 3, True: 4}
BACKWARD_COPIES = {False: 6, True: 8}
DROPOUT_COPIES = 3
# Bytes for each element where torch's integer operations draw the mask, two products with it included; on a GPU one
# kernel draws it.
MASK_BYTES = 40
# Torch's operations take some rows of a group at a time: their temporaries fill at most one such part of the memory.
ROWS_SHARE = 2
# ``sums.add_product`` converts operands in pieces that take this share of the float32 sum's bytes.
CONVERTED_SHARE = 1 / 4


@dataclass(frozen=True, kw_only=True)
class ChunkRule:
    """The bound of a chunk: products of more tokens are not faster."""

    most_rows: int


CHUNK_RULE = fitted("ffn", ChunkRule)


@dataclass(frozen=True)
class ChunkPlan:
    """The forward pass takes ``rows`` tokens at a time, the backward pass groups of ``columns`` hidden units.

    Of a group, ``hidden_columns`` units at a time have their hidden in memory, with ``hidden_in_dx`` in that of dx.
    Torch's operations compute ``group_rows`` tokens of these at a time, a kernel all tokens.
    """

    rows: int
    columns: int
    hidden_columns: int
    hidden_in_dx: bool
    group_rows: int
    workspace_bytes: int


def workspace_limit(problem: Any) -> int:
    """The most bytes of temporary memory that a call with ``recompute=True`` may take, forward or backward."""
    x: int = problem.element_bytes * problem.batch * problem.M * max(problem.K, LEAST_COLUMNS)
    return max(LEAST_WORKSPACE, WORKSPACE_COPIES * x)


def plan(problem: Any, device: Device, kernels: bool) -> ChunkPlan:
    """The chunks of ``problem``, a ``planning.Problem`` of an FFN; ``kernels`` says what computes them."""
    p, limit = problem, workspace_limit(problem)
    forward = p.N * (p.element_bytes if kernels else _torch_bytes(p, device, FORWARD_COPIES))
    rows = _rows(p.M, limit // forward)
    if not p.training:
        return ChunkPlan(rows, 0, 0, False, 0, rows * forward)
    # A dx in float32 is summed in place.
    summed = p.format.narrow and p.needs_data_gradient
    sums = 4 * p.M * p.K * summed
    if device.kind != "cuda":
        # Without a product of 16-bit operands that adds to float32, both are converted, piece by piece.
        sums += math.ceil(sums * CONVERTED_SHARE)
    room = limit - sums - (0 if kernels else limit // ROWS_SHARE)
    # The bytes of one hidden unit's pre-activations.
    unit = p.M * p.element_bytes * (2 if p.gated else 1)
    groups = _groups(p, room, unit, summed)
    if kernels:
        partial = _partial_bytes(p, device)
        # Partial sums lie where the group's gradient of w_up will be, if that is large enough.
        if partial * groups.hidden_columns > p.element_bytes * p.K * groups.columns:
            unit += partial
            groups = _groups(p, room, unit, summed)
    taken = sums + groups.columns * (unit + _hidden_bytes(p) * (not groups.hidden_in_dx))
    group_rows = p.M
    if not kernels:
        each = groups.hidden_columns * _torch_bytes(p, device, BACKWARD_COPIES)
        group_rows = max(1, min(p.M, limit // ROWS_SHARE // each))
        taken += group_rows * each
    return ChunkPlan(rows, *groups, group_rows, max(rows * forward, taken))


class _Groups(NamedTuple):
    """The groups of hidden units in the backward pass: see ``ChunkPlan``."""

    columns: int
    hidden_columns: int
    hidden_in_dx: bool


def _groups(problem: Any, room: int, unit: int, summed: bool) -> _Groups:
    """As few groups as fit into ``room`` bytes with ``unit`` bytes for each hidden unit.

    There are at least two, so that the whole hidden is never in memory. ``summed``: dx is summed elsewhere, and its own
    memory is free.
    """
    p, beside = problem, max(1, room // (unit + _hidden_bytes(problem)))
    most = max(1, room // unit) if summed else beside
    if most > max(p.K, beside):
        # The hidden lies in the memory of dx, for as many units at a time as dx has columns.
        most = most // p.K * p.K
    count = max(2, math.ceil(p.N / (most // _step(most) * _step(most))))
    columns = _columns(p.N, count)
    whole = math.ceil(columns / p.K) * p.K
    if whole <= most and whole < p.N and (count > 2 or columns > max(p.K, beside)):
        # With as many groups, weight gradients whose height is a multiple of the width fill waves of SMs better: of
        # 14,336 units and 4096 columns, 512 tiles of 128 × 256 instead of 448 on 132 SMs.
        columns = whole
    in_dx = summed and (columns <= p.K or columns > beside)
    return _Groups(columns, min(columns, p.K) if in_dx else columns, in_dx)


def _hidden_bytes(problem: Any) -> int:
    """Bytes of the hidden of one unit, if the gradient of w_down needs it."""
    hidden: int = problem.M * problem.element_bytes * problem.needs_weight_gradient
    return hidden


def _partial_bytes(problem: Any, device: Device) -> int:
    """Bytes of one unit's partial sums of bias gradients in the kernels, at most one for the rows of each tile."""
    p, parts = problem, 2 if problem.gated else 1
    tiles = epilogue_tiles(device.architecture, p.format.bits, p.gated, p.dropout)
    bands = math.ceil(p.M / min(tiles.block_m, 2 * CONSUMER_ROWS // parts))
    return 4 * bands * parts * int(p.needs_bias_gradient)


def _torch_bytes(problem: Any, device: Device, copies: dict[bool, int]) -> int:
    """Temporary memory for each element of the hidden where torch's operations compute it."""
    dropout = DROPOUT_COPIES * problem.element_bytes if device.kind == "cuda" else MASK_BYTES
    copied: int = copies[problem.gated] * problem.element_bytes
    return copied + dropout * problem.dropout


def _rows(tokens: int, most: int) -> int:
    """Tokens of equal chunks: at most ``most``, and half of all, so that the whole hidden is never in memory."""
    most = max(1, min(most, tokens // 2, CHUNK_RULE.most_rows))
    step = ROW_STEP if most >= ROW_STEP else 1
    chunks = math.ceil(tokens / (most // step * step))
    return math.ceil(tokens / chunks / step) * step


def _columns(hidden: int, groups: int) -> int:
    """Hidden units of each of so many equal groups."""
    columns = math.ceil(hidden / groups)
    step = _step(columns)
    return min(hidden, math.ceil(columns / step) * step)


def _step(columns: int) -> int:
    return next(step for step in COLUMN_STEPS if columns >= step)
