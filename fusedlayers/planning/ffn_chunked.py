"""The chunked path of an FFN: which part of the hidden is in memory at once, so that a bound of bytes is kept.

The forward pass takes some tokens at a time. The backward pass takes ``rows`` tokens × ``columns`` hidden units, all
tokens for one group of hidden units after the other. So the weight gradients of a group are complete, and rounded once,
before those of the next begin, and only their float32 sums need memory; dx is added up over the groups in its own
dtype. Of all chunks that fit the fewest are taken: each is a dozen launches, and reads and writes the float32 sums.
"""

import math
from dataclasses import dataclass
from typing import Any

from .devices import SIXTEEN_BITS, Device

# Bytes of temporary memory that a call with recompute=True may take, forward or backward.
WORKSPACE_LIMIT = 64 * 2**20

# Groups whose parts of dx are added up, each rounded to the dtype of dx. On a CPU, in bfloat16 and float16, plain and
# gated, the error of dx with 4 of them was at most 1.24 (root mean square) and 1.72 (largest) times torch's own; with 5
# to 8 it passed 2, the limit of the closeness rule, in some draws.
MOST_GROUPS = 4
# Sizes are multiples of these where they are larger: whole tiles of the kernels, and aligned addresses.
ROW_STEP = 256
COLUMN_STEP = 128

# Copies of a chunk's hidden that torch's operations have in memory at once, forward and backward, by whether there is a
# gate: counted, for the activation that needs most (relu2). Dropout adds the mask and two products with it.
FORWARD_COPIES = {False: 3, True: 4}
BACKWARD_COPIES = {False: 7, True: 10}
DROPOUT_COPIES = 3
# Bytes for each element where torch's integer operations draw the mask, with two products; on a GPU one kernel does.
MASK_BYTES = 40


@dataclass(frozen=True)
class ChunkPass:
    """One pass over the hidden in the backward pass, and the gradients that it yields."""

    rows: int
    columns: int
    data: bool
    weights: bool


@dataclass(frozen=True)
class ChunkPlan:
    """``rows`` tokens at a time in the forward pass; the passes of the backward pass, one or two."""

    rows: int
    passes: tuple[ChunkPass, ...]
    workspace_bytes: int


@dataclass(frozen=True)
class _Costs:
    """Bytes of temporary memory in the backward pass: for each element, token and hidden unit of a chunk."""

    element: float
    token: int
    unit: int
    sums: int = 0  # for each hidden unit, where chunks of tokens are added up in float32

    def bytes(self, rows: int, columns: int, tokens: int) -> int:
        """What a chunk takes, one of several if it has fewer rows than there are tokens."""
        sums = self.sums if rows < tokens else 0
        return math.ceil(rows * (columns * self.element + self.token)) + columns * (self.unit + sums)

    def most_rows(self, columns: int) -> int:
        """The rows of the largest chunk that fits, one of several."""
        left = WORKSPACE_LIMIT - columns * (self.unit + self.sums)
        return int(left / (columns * self.element + self.token))


def plan(problem: Any, device: Device, kernels: bool) -> ChunkPlan:
    """The chunks of ``problem``, a ``planning.Problem`` of an FFN; ``kernels`` says what computes them."""
    p = problem
    forward = p.N * _forward_bytes(p, device, kernels)
    rows = _rows(p.M, WORKSPACE_LIMIT // forward)
    passes = _passes(p, device, kernels)
    used = [rows * forward]
    used += [_costs(p, device, kernels, each.weights).bytes(each.rows, each.columns, p.M) for each in passes]
    return ChunkPlan(rows, passes, max(used))


def _passes(problem: Any, device: Device, kernels: bool) -> tuple[ChunkPass, ...]:
    p = problem
    data, weights = p.needs_data_gradient, p.needs_weight_gradient
    if not p.training:
        return ()
    # Where nothing fits.
    least = (1, 1)
    if not (data and weights):
        rows, columns = _fit(p, _costs(p, device, kernels, weights), p.N if weights else 1) or least
        return (ChunkPass(rows, columns, data, weights),)
    costs = _costs(p, device, kernels, True)
    if (chunk := _fit(p, costs, MOST_GROUPS)) is not None:
        return (ChunkPass(chunk[0], chunk[1], data=True, weights=True),)
    # Exact sums of both at once do not fit: each with a pass of its own, which computes the hidden once more.
    first = _fit(p, _costs(p, device, kernels, False), 1) or least
    second = _fit(p, costs, p.N) or least
    of_data = ChunkPass(first[0], first[1], data=True, weights=False)
    return of_data, ChunkPass(second[0], second[1], data=False, weights=True)


def _fit(problem: Any, costs: _Costs, most_groups: int) -> tuple[int, int] | None:
    """(rows, columns) of the fewest chunks that fit, of at most so many groups of hidden units, or None."""
    p = problem
    fitting: list[tuple[int, int, tuple[int, int]]] = []
    # Every number of groups up to 64, then those that double: a very wide layer has too many to try.
    numbers = [*range(1, 65), *(2**power for power in range(7, p.N.bit_length()))]
    for columns in {_columns(p.N, groups) for groups in numbers if groups <= most_groups}:
        if columns < p.N and costs.bytes(p.M, columns, p.M) <= WORKSPACE_LIMIT:
            rows = p.M
        elif costs.most_rows(columns) >= 1:
            rows = _rows(p.M, costs.most_rows(columns))
        else:
            continue
        groups = math.ceil(p.N / columns)
        # As many chunks in fewer groups: dx is rounded less often.
        fitting.append((groups * math.ceil(p.M / rows), groups, (rows, columns)))
    return min(fitting)[-1] if fitting else None


def _costs(problem: Any, device: Device, kernels: bool, weights: bool) -> _Costs:
    p = problem
    narrow = p.dtype in SIXTEEN_BITS
    first = 2 if p.gated else 1
    sums = 4 * (first * p.K + p.O) if weights and narrow else 0
    biases = 8 * first * weights
    if kernels:
        # The pre-activations, which their gradients replace, the hidden, and partial sums of every 32 rows or more.
        return _Costs((first + 1) * p.element_bytes + first / 8, 0, biases + 4 * first, sums)
    element = _torch_bytes(p, device, BACKWARD_COPIES)
    if not (narrow and weights and device.kind != "cuda"):
        return _Costs(element, 0, biases, sums)
    # Without a product of 16-bit operands that adds to float32, both operands and the product are float32.
    widest = 4 * max(p.K, p.O)
    return _Costs(element + 4, widest, biases, sums + widest)


def _forward_bytes(problem: Any, device: Device, kernels: bool) -> int:
    """Temporary memory of the forward pass for each element of the hidden."""
    element: int = problem.element_bytes
    return element if kernels else _torch_bytes(problem, device, FORWARD_COPIES)


def _torch_bytes(problem: Any, device: Device, copies: dict[bool, int]) -> int:
    """The same where torch's operations compute a chunk, forward or backward."""
    dropout = DROPOUT_COPIES * problem.element_bytes if device.kind == "cuda" else MASK_BYTES
    found: int = copies[problem.gated] * problem.element_bytes + dropout * problem.dropout
    return found


def _rows(tokens: int, most: int) -> int:
    """Chunks of alike and at most so many tokens, and of half of them: nothing holds the whole hidden."""
    most = max(1, min(most, tokens // 2))
    step = ROW_STEP if most >= ROW_STEP else 1
    chunks = math.ceil(tokens / (most // step * step))
    return math.ceil(tokens / chunks / step) * step


def _columns(hidden: int, groups: int) -> int:
    """Hidden units of each of so many groups that are alike."""
    columns = math.ceil(hidden / groups)
    step = COLUMN_STEP if columns >= COLUMN_STEP else 1
    return min(hidden, math.ceil(columns / step) * step)
