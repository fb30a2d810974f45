"""The chunked path of an FFN: which part of the hidden is in memory at once, so that a bound of bytes is kept.

The forward pass takes some tokens at a time. The backward pass takes ``rows`` tokens × ``columns`` hidden units, all
tokens for one group of hidden units after the other, and has their pre-activations in memory, which their gradients
replace; the hidden itself is there for ``slice_columns`` of them at a time. So the weight gradients of a group are
complete, and rounded once, before those of the next begin, and only their float32 sums need memory, none if a chunk has
all tokens. dx is added up over the groups: by a kernel that carries four bits more than it has, in half a byte for each
element, or in its own dtype. Of all chunks that fit those are taken that cost least: each chunk reads its tokens and
weights, adds to sums, launches its products, and leaves processors idle where these have no whole waves of tiles.
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
# Rows and columns of tiles: those of cuBLAS's large products, and those of the kernels and of what is added to float32
# sums, which were not seen to be computed in larger ones, nor in ranges of the tokens.
LARGE_TILES = ((128, 256), (256, 128))
SMALL_TILES = ((128, 128),)
# What an H200 computes in the time in which it moves a byte.
FLOPS_FOR_A_BYTE = 184
# Costs are rough, within a factor of two of what was measured: by so much two passes must be cheaper to be taken where
# one is possible. Tiny groups, all that fits beside the bits of a large dx, cost several times as much.
APART_FROM = 2
# Sizes are multiples of the first of these that are not larger: whole tiles of the kernels, and aligned addresses.
ROW_STEP = 256
COLUMN_STEPS = (128, 8, 1)

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
    carried: bool = False  # whether a kernel keeps the bits of dx that groups would round away


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
        used.append(costs.bytes(each.rows, each.columns, each.slice_columns, p.M) + _carried_bytes(p) * each.carried)
    return ChunkPlan(rows, passes, max(used))


def _passes(problem: Any, device: Device, kernels: bool) -> tuple[ChunkPass, ...]:
    p = problem
    data, weights = p.needs_data_gradient, p.needs_weight_gradient
    if not p.training:
        return ()
    together = _fit(p, device, kernels, data, weights)
    if not (data and weights):
        return (together or ChunkPass(1, 1, 1, data, weights),)
    # Each with a pass of its own, which computes the hidden and its gradient once more.
    yields = ((True, False), (False, True))
    apart = tuple(_fit(p, device, kernels, *each) or ChunkPass(1, 1, 1, *each) for each in yields)
    if together is None:
        return apart
    again = 2.0 * p.M * p.N * (p.K * (2 if p.gated else 1) + p.O) / FLOPS_FOR_A_BYTE
    apart_cost = again + sum(_cost(p, device, each) for each in apart)
    return (together,) if _cost(p, device, together) < APART_FROM * apart_cost else apart


def _fit(problem: Any, device: Device, kernels: bool, data: bool, weights: bool) -> ChunkPass | None:
    """The cheapest pass that fits and yields these gradients, or None."""
    p = problem
    costs = _costs(p, device, kernels, weights)
    # dx alone needs no groups: there are no sums whose memory they would share out.
    most_rounded = p.N if not data else MOST_GROUPS[p.gated] if weights else 1
    ways = [(most_rounded, False)]
    if kernels and data and weights and p.dtype in SIXTEEN_BITS:
        ways.append((p.N, True))
    fitting: list[ChunkPass] = []
    # Every number of groups up to 64, then those that double: a very wide layer has too many to try.
    numbers = [*range(1, 65), *(2**power for power in range(7, p.N.bit_length()))]
    for most_groups, carried in ways:
        limit = p.workspace_limit - _carried_bytes(p) * carried
        for columns in sorted({_columns(p.N, groups) for groups in numbers if groups <= most_groups}, reverse=True):
            if carried and columns == p.N:
                continue
            for slice_columns in sorted({_columns(columns, slices) for slices in SLICES}, reverse=True):
                if columns < p.N and costs.bytes(p.M, columns, slice_columns, p.M) <= limit:
                    fitting.append(ChunkPass(p.M, columns, slice_columns, data, weights, carried))
                elif (most := costs.most_rows(columns, slice_columns, limit)) >= 1:
                    fitting.append(ChunkPass(_rows(p.M, most), columns, slice_columns, data, weights, carried))
    return min(fitting, key=lambda each: _cost(p, device, each), default=None)


def _carried_bytes(problem: Any) -> int:
    """Four bits for each element of dx, whole bytes in a row."""
    return problem.M * math.ceil(problem.K / 2)


def _cost(problem: Any, device: Device, step: ChunkPass) -> float:
    """Roughly, in bytes that the device could move meanwhile, but for what is the same however the hidden is cut."""
    p = problem
    parts = 2 if p.gated else 1
    rows, columns, part = step.rows, step.columns, step.slice_columns
    slices = math.ceil(columns / part)
    x, dy, first, down = rows * p.K, rows * p.O, parts * columns * p.K, columns * p.O
    # The pre-activations; their gradients.
    launches = parts + slices
    elements = x + first + slices * dy + down
    idle = parts * _idle_flops(rows, columns, p.K, device, LARGE_TILES)
    idle += slices * _idle_flops(rows, part, p.O, device, SMALL_TILES)
    sums: float = 0
    if step.data:
        rounded = 1 if step.carried else parts
        launches += rounded
        elements += rounded * 2 * x + first
        sums += x * step.carried
        idle += parts * _idle_flops(rows, p.K, columns, device, SMALL_TILES if step.carried else LARGE_TILES)
    if step.weights:
        launches += parts + slices
        elements += parts * x + slices * dy
        whole = rows >= p.M
        sums += 2 * (first + down) * (p.element_bytes if whole else max(4, p.element_bytes))
        for count, height, width in ((parts, columns, p.K), (slices, p.O, part)):
            ranges = _ranges(height, width, device) if whole else 1
            sums += count * 2 * 4 * height * width * (ranges if ranges > 1 else 0)
            idle += count * _idle_flops(height, width, rows, device, LARGE_TILES if whole else SMALL_TILES, ranges)
    chunks = math.ceil(p.M / rows) * math.ceil(p.N / columns)
    return chunks * (launches * LAUNCH_BYTES + elements * p.element_bytes + sums + idle / FLOPS_FOR_A_BYTE)


def _ranges(rows: int, columns: int, device: Device) -> int:
    """Ranges of the inner axis that together fill the processors, where the large tiles of a product do not."""
    return max(1, device.processors // min(_tiles(rows, columns, tile) for tile in LARGE_TILES))


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])


def _idle_flops(
    rows: int, columns: int, inner: int, device: Device, tiles: tuple[tuple[int, int], ...], ranges: int = 1
) -> float:
    """What the processors without a tile could compute, while those that have one finish a product."""
    idle = []
    for tile in tiles:
        waves = math.ceil(_tiles(rows, columns, tile) * ranges / device.processors)
        idle.append(waves * device.processors * tile[0] * tile[1] / ranges - rows * columns)
    return 2 * inner * max(0, min(idle))


def _costs(problem: Any, device: Device, kernels: bool, weights: bool) -> _Costs:
    p = problem
    narrow = p.dtype in SIXTEEN_BITS
    parts = 2 if p.gated else 1
    element = parts * p.element_bytes
    sums = 4 * (parts * p.K + p.O) if weights and narrow else 0
    # float32, of all hidden units and of a slice.
    biases = 8 * parts * weights
    if kernels:
        # The hidden, and partial sums of every 64 rows or more, in 32 bits every 32.
        return _Costs(element, (p.element_bytes + parts / (16 if narrow else 8)) * weights, 0, biases, sums)
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
    step = next(step for step in COLUMN_STEPS if columns >= step)
    return min(hidden, math.ceil(columns / step) * step)
