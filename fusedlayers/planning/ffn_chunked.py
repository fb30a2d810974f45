"""The chunked path of an FFN: which part of the hidden is in memory at once, so that a bound of bytes is kept.

The forward pass takes some tokens at a time. The backward pass takes groups of hidden units, all tokens at once: the
pre-activations of a group, which their gradients replace, and its hidden. So the weight gradients of a group are
complete, and rounded once, before the next one begins; dx is summed over the groups in float32. Until it is rounded
into its own tensor at the end, that tensor is free, and the hidden of a group lies there where it fits.
"""

import math
from dataclasses import dataclass
from typing import Any

from .devices import SIXTEEN_BITS, Device

# The temporary memory of a call with recompute=True, in bytes of x; and what it may be however small x is.
WORKSPACE_COPIES, LEAST_WORKSPACE = 4, 64 * 2**20
# A row of x counts as so many columns at least: fewer have no room for a single hidden unit beside the sum of dx.
LEAST_COLUMNS = 8
# Products of more tokens are not faster.
MOST_ROWS = 16_384
# Sizes are multiples of the first of these that is not larger: whole tiles of the kernels, and aligned addresses.
ROW_STEP = 256
COLUMN_STEPS = (128, 8, 1)

# Copies of the hidden that torch's operations have in memory at once, forward and backward, by whether there is a gate:
# counted, for the activation that needs most (relu2). Dropout adds the mask and two products with it.
FORWARD_COPIES = {False: 3, True: 4}
BACKWARD_COPIES = {False: 6, True: 8}
DROPOUT_COPIES = 3
# Bytes for each element where torch's integer operations draw the mask, with two products; on a GPU one kernel does.
MASK_BYTES = 40
# Torch's operations take some rows of a group at a time: their copies fill at most this part of the memory.
ROWS_SHARE = 8
# Of a float32 sum, what is converted at once of the operands of a product that is added to it: ``sums.add_product``.
CONVERTED_SHARE = 1 / 4


@dataclass(frozen=True)
class ChunkPlan:
    """``rows`` tokens at a time in the forward pass, groups of ``columns`` hidden units in the backward pass.

    ``group_rows`` tokens of a group at a time go through torch's operations, all of them through a kernel;
    ``hidden_in_dx``: the hidden of a group lies in the memory of dx.
    """

    rows: int
    columns: int
    group_rows: int
    hidden_in_dx: bool
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
        return ChunkPlan(rows, 0, 0, False, rows * forward)
    parts, narrow = 2 if p.gated else 1, p.dtype in SIXTEEN_BITS
    # A wider dx is its own sum.
    summed = narrow and p.needs_data_gradient
    sums = 4 * p.M * p.K * summed
    if device.kind != "cuda":
        # Without a product of 16-bit operands that adds to float32, both are converted, piece by piece.
        sums += math.ceil(sums * CONVERTED_SHARE)
    # Of each hidden unit: its pre-activations and its hidden.
    unit = p.M * p.element_bytes * parts
    if kernels:
        # Their partial sums, of 64 rows or more of 16 bits, of 32 rows of 32.
        unit += math.ceil(p.M / (64 if narrow else 32)) * 4 * parts * p.needs_bias_gradient
    hidden = p.M * p.element_bytes * p.needs_weight_gradient
    room = limit - sums - (0 if kernels else limit // ROWS_SHARE)
    most = max(room // (unit + hidden), min(p.K, room // unit) if summed else 0, 1)
    # As few groups as fit, but two, so that nothing holds the whole hidden.
    groups = max(2, math.ceil(p.N / (most // _step(most) * _step(most))))
    columns = _columns(p.N, groups)
    if groups > 2 and columns < p.K <= most:
        # Not more of them, and square weight gradients, as whole waves of tiles as those of the width itself: of 14,336
        # units and 4096 columns, 512 tiles of 128 × 256 and not 448 on 132 SMs.
        columns = p.K
    hidden_in_dx = summed and columns <= p.K
    taken = sums + columns * (unit + hidden * (not hidden_in_dx))
    group_rows = p.M
    if not kernels:
        each = columns * _torch_bytes(p, device, BACKWARD_COPIES)
        group_rows = max(1, min(p.M, limit // ROWS_SHARE // each))
        taken += group_rows * each
    return ChunkPlan(rows, columns, group_rows, hidden_in_dx, max(rows * forward, taken))


def _torch_bytes(problem: Any, device: Device, copies: dict[bool, int]) -> int:
    """Temporary memory for each element of the hidden where torch's operations compute it."""
    dropout = DROPOUT_COPIES * problem.element_bytes if device.kind == "cuda" else MASK_BYTES
    copied: int = copies[problem.gated] * problem.element_bytes
    return copied + dropout * problem.dropout


def _rows(tokens: int, most: int) -> int:
    """Chunks of alike and at most so many tokens, and of half of them: nothing holds the whole hidden."""
    most = max(1, min(most, tokens // 2, MOST_ROWS))
    step = ROW_STEP if most >= ROW_STEP else 1
    chunks = math.ceil(tokens / (most // step * step))
    return math.ceil(tokens / chunks / step) * step


def _columns(hidden: int, groups: int) -> int:
    """Hidden units of each of so many groups that are alike."""
    columns = math.ceil(hidden / groups)
    step = _step(columns)
    return min(hidden, math.ceil(columns / step) * step)


def _step(columns: int) -> int:
    return next(step for step in COLUMN_STEPS if columns >= step)
