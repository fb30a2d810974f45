"""The chunked path of an FFN: which part of the hidden is in memory at once, so that a bound of bytes is kept.

The forward pass takes some tokens at a time. The backward pass takes ``rows`` tokens × ``columns`` hidden units, all
tokens for one group of hidden units after the other, and has their pre-activations in memory, which their gradients
replace; the hidden itself is there for ``slice_columns`` of them at a time. So the weight gradients of a group are
complete, and rounded once, before those of the next begin, and only their float32 sums need memory; dx is added up over
the groups in its own dtype. Of all chunks that fit those are taken that move the fewest bytes: each chunk reads its
tokens and weights, and adds to sums.
"""

import math
from dataclasses import dataclass
from typing import Any

from .devices import SIXTEEN_BITS, Device

# Bytes of temporary memory that a call with recompute=True may take, forward or backward, unless the user names others.
WORKSPACE_LIMIT = 64 * 2**20

# Groups whose parts of dx are added up, each rounded to the dtype of dx, by whether there is a gate (parts through a
# gate and through what it multiplies are rounded each). On an H200 in bfloat16, 64 × 64 tiles of dx came to 0.94 of the
# closeness rule's limit with 2 plain groups and to 1.11 with 2 gated ones; on a CPU, tiles failed with 3 plain ones.
MOST_GROUPS = {False: 2, True: 1}
# Into how many slices the hidden of a chunk is cut.
SLICES = (1, 2, 4, 8)
# What a launch costs, in bytes that could be moved meanwhile: the device fills and drains. On an H200 (16,384 tokens ×
# 1024 × 4096) two slices instead of one, 12 launches more, took 131 µs, in which it moves 48 MiB for each of them.
LAUNCH_BYTES = 48 * 2**20
# Sizes are multiples of these where they are larger: whole tiles of the kernels, and aligned addresses.
ROW_STEP = 256
COLUMN_STEP = 128

# Copies of the hidden that torch's operations have in memory at once, of a chunk forward, of a slice backward, by
# whether there is a gate: counted, for the activation that needs most (relu2). Dropout adds the mask and two products
# with it.
FORWARD_COPIES = {False: 3, True: 4}
BACKWARD_COPIES = {False: 6, True: 8}
DROPOUT_COPIES = 3
# Bytes for each element where torch's integer operations draw the mask, with two products; on a GPU one kernel does.
MASK_BYTES = 40


@dataclass(frozen=True)
class ChunkPass:
    """One pass over the hidden in the backward pass, and the gradients that it yields."""

    rows: int
    columns: int
    slice_columns: int
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
    slice_element: float  # more, for those of a slice
    token: int
    unit: int
    sums: int  # for each hidden unit, where chunks of tokens are added up in float32

    def bytes(self, rows: int, columns: int, slice_columns: int, tokens: int) -> int:
        """What a chunk takes, one of several if it has fewer rows than there are tokens."""
        units = columns * (self.unit + self.sums * (rows < tokens))
        return math.ceil(rows * self._token_bytes(columns, slice_columns)) + units

    def most_rows(self, columns: int, slice_columns: int, limit: int) -> int:
        """The rows of the largest chunk within so many bytes, one of several."""
        left = limit - columns * (self.unit + self.sums)
        return int(left / self._token_bytes(columns, slice_columns))

    def _token_bytes(self, columns: int, slice_columns: int) -> float:
        return columns * self.element + slice_columns * self.slice_element + self.token


def plan(problem: Any, device: Device, kernels: bool) -> ChunkPlan:
    """The chunks of ``problem``, a ``planning.Problem`` of an FFN; ``kernels`` says what computes them."""
    p = problem
    forward = p.N * _forward_bytes(p, device, kernels)
    rows = _rows(p.M, p.workspace_limit // forward)
    passes = _passes(p, device, kernels)
    used = [rows * forward]
    for each in passes:
        costs = _costs(p, device, kernels, each.weights)
        used.append(costs.bytes(each.rows, each.columns, each.slice_columns, p.M))
    return ChunkPlan(rows, passes, max(used))


def _passes(problem: Any, device: Device, kernels: bool) -> tuple[ChunkPass, ...]:
    p = problem
    data, weights = p.needs_data_gradient, p.needs_weight_gradient
    if not p.training:
        return ()
    if (together := _fit(p, device, kernels, data, weights)) is not None:
        return (together,)
    # Both at once do not fit: each with a pass of its own, which computes the hidden once more.
    apart = ((True, False), (False, True)) if data and weights else ((data, weights),)
    return tuple(_fit(p, device, kernels, *each) or ChunkPass(1, 1, 1, *each) for each in apart)


def _fit(problem: Any, device: Device, kernels: bool, data: bool, weights: bool) -> ChunkPass | None:
    """The cheapest pass that fits and yields these gradients, or None."""
    p = problem
    costs = _costs(p, device, kernels, weights)
    # dx alone needs no groups: there are no sums whose memory they would share out.
    most_groups = p.N if not data else MOST_GROUPS[p.gated] if weights else 1
    fitting: list[ChunkPass] = []
    # Every number of groups up to 64, then those that double: a very wide layer has too many to try.
    numbers = [*range(1, 65), *(2**power for power in range(7, p.N.bit_length()))]
    for columns in sorted({_columns(p.N, groups) for groups in numbers if groups <= most_groups}, reverse=True):
        for slice_columns in sorted({_columns(columns, slices) for slices in SLICES}, reverse=True):
            if columns < p.N and costs.bytes(p.M, columns, slice_columns, p.M) <= p.workspace_limit:
                fitting.append(ChunkPass(p.M, columns, slice_columns, data, weights))
            elif (most := costs.most_rows(columns, slice_columns, p.workspace_limit)) >= 1:
                fitting.append(ChunkPass(_rows(p.M, most), columns, slice_columns, data, weights))
    return min(fitting, key=lambda each: _moved_bytes(p, each), default=None)


def _moved_bytes(problem: Any, step: ChunkPass) -> int:
    """Roughly, in and out of the device's memory, but for what is the same however the hidden is cut."""
    p = problem
    parts = 2 if p.gated else 1
    slices = math.ceil(step.columns / step.slice_columns)
    x, dy, first, down = step.rows * p.K, step.rows * p.O, parts * step.columns * p.K, step.columns * p.O
    # The pre-activations; their gradients.
    launches = parts + slices
    elements = x + first + slices * dy + down
    sums = 0
    if step.data:
        launches += parts
        elements += parts * 2 * x + first
    if step.weights:
        launches += parts + slices
        elements += parts * x + slices * dy
        sums = 2 * (first + down) * (max(4, p.element_bytes) if step.rows < p.M else p.element_bytes)
    chunks = math.ceil(p.M / step.rows) * math.ceil(p.N / step.columns)
    return chunks * (launches * LAUNCH_BYTES + elements * p.element_bytes + sums)


def _costs(problem: Any, device: Device, kernels: bool, weights: bool) -> _Costs:
    p = problem
    narrow = p.dtype in SIXTEEN_BITS
    parts = 2 if p.gated else 1
    element = parts * p.element_bytes
    sums = 4 * (parts * p.K + p.O) if weights and narrow else 0
    # float32, of all hidden units and of a slice.
    biases = 8 * parts * weights
    if kernels:
        # The hidden, and partial sums of every 32 rows or more.
        return _Costs(element, (p.element_bytes + parts / 8) * weights, 0, biases, sums)
    of_slice = _torch_bytes(p, device, BACKWARD_COPIES)
    if not (narrow and weights and device.kind != "cuda"):
        return _Costs(element, of_slice, 0, biases, sums)
    # Without a product of 16-bit operands that adds to float32, both operands and the product are float32.
    widest = 4 * max(p.K, p.O)
    return _Costs(element + 4, of_slice + 4, widest, biases, sums + widest)


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
