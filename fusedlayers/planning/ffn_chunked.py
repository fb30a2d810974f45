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
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from .devices import SIXTEEN_BITS, Device
from .ffn_chunk_costs import ChunkCost, Cut, Layer, chunk_cost

# Bytes of temporary memory that a call with recompute=True may take, forward or backward, unless the user names others.
WORKSPACE_LIMIT = 64 * 2**20

# Groups whose parts of dx are added up, each rounded to the dtype of dx, by whether there is a gate (parts through a
# gate and through what it multiplies are rounded each). On an H200 in bfloat16, 64 × 64 tiles of dx came to 0.94 of the
# closeness rule's limit with 2 plain groups and to 1.11 with 2 gated ones; on a CPU, tiles failed with 3 plain ones.
MOST_GROUPS = {False: 2, True: 1}
# Into how many slices the hidden of a chunk is cut.
SLICES = (1, 2, 4, 8)
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


class _Memory(NamedTuple):
    """Bytes of temporary memory in the backward pass: for each element, token and hidden unit of a chunk."""

    element: float
    slice_element: float  # more, for those of a slice
    token: int
    unit: int
    sums: int  # for each hidden unit, where chunks of tokens are added up in float32
    carried: int  # for each token of the call, where the bits of dx that groups would round away are kept

    def bytes(self, step: ChunkPass, tokens: int) -> int:
        """What a pass takes; its chunks are some of several if they have fewer rows than there are tokens."""
        units = step.columns * (self.unit + self.sums * (step.rows < tokens))
        chunk = math.ceil(step.rows * self.token_bytes(step.columns, step.slice_columns)) + units
        return chunk + self.carried * tokens * step.carried

    def token_bytes(self, columns: int, slice_columns: int) -> float:
        """What each row of a chunk takes."""
        return columns * self.element + slice_columns * self.slice_element + self.token


class _Whole(NamedTuple):
    """A cut whose chunks have all tokens, as long as there are at most ``most_tokens``.

    All groups together cost ``fixed + tokens * each_token`` or more.
    """

    fixed: float
    each_token: float
    most_tokens: int
    cut: Cut
    groups: int
    cost: ChunkCost


class _Parted(NamedTuple):
    """A cut whose chunks have some of the tokens, from ``least_tokens`` on.

    All chunks together cost ``tokens * each_token`` or more. Each row of a chunk needs ``row`` bytes; there are
    ``room``, less ``carried`` for each token of the call.
    """

    each_token: float
    least_tokens: int
    room: int
    carried: int
    row: float
    cut: Cut
    groups: int
    cost: ChunkCost


class _Search:
    """Every cut of a layer's hidden for a pass, from the one that may cost least.

    A cut whose least possible cost is above that of one already found is not looked at, nor are those behind it.
    """

    def __init__(self, layer: Layer, data: bool, weights: bool) -> None:
        self.memory = memory = _memory(layer, weights)
        self._whole: list[_Whole] = []
        self._parted: list[_Parted] = []
        for cut in _cuts(layer, data, weights):
            columns, groups = cut.columns, math.ceil(layer.N / cut.columns)
            row, carried = memory.token_bytes(columns, cut.slice_columns), memory.carried * cut.carried
            most_tokens = 0
            if columns < layer.N and (room := layer.workspace_limit - columns * memory.unit) >= 0:
                most_tokens = int(room // (row + carried))
                cost = chunk_cost(layer, cut, True)
                bounds = groups * cost.fixed, groups * cost.each_row
                self._whole.append(_Whole(*bounds, most_tokens, cut, groups, cost))
            room = layer.workspace_limit - columns * (memory.unit + memory.sums)
            most_rows = int((room - carried * (most_tokens + 1)) / row)
            if most_rows >= 1:
                cost = chunk_cost(layer, cut, False)
                bound = groups * (cost.fixed / most_rows + cost.each_row)
                self._parted.append(_Parted(bound, most_tokens + 1, room, carried, row, cut, groups, cost))
        self._whole.sort(key=lambda each: each.fixed)
        self._parted.sort(key=lambda each: each.each_token)
        # The most tokens that any of the first cuts takes: those before the first that may fit are skipped at once.
        self._reach = list(accumulate((each.most_tokens for each in self._whole), max))
        self._least_each = min((each.each_token for each in self._whole), default=0.0)

    def cheapest(self, tokens: int, below: float = math.inf) -> tuple[float, ChunkPass | None]:
        """The cheapest pass that fits, and its cost, if that is ``below`` so much; else None."""
        best, found, found_rows = below, None, tokens
        least = tokens * self._least_each
        for fixed, each_token, most_tokens, cut, groups, chunk in self._whole[bisect_left(self._reach, tokens) :]:
            if fixed + least >= best:
                break
            if tokens <= most_tokens and fixed + tokens * each_token < best:
                cost = groups * chunk.of(tokens)
                if cost < best:
                    best, found = cost, cut
        for bound, least_tokens, room, carried, row, cut, groups, chunk in self._parted:
            if tokens * bound >= best:
                break
            # There are at least two chunks, of more than one token.
            if tokens < least_tokens or min(tokens, 2) * groups * chunk.fixed >= best:
                continue
            if (most := int((room - carried * tokens) / row)) < 1:
                continue
            rows = _rows(tokens, most)
            cost = math.ceil(tokens / rows) * groups * chunk.of(rows)
            if cost < best:
                best, found, found_rows = cost, cut, rows
        if found is None:
            return best, None
        return best, ChunkPass(found_rows, *found)


# As many layers as a model may have of different shapes, each with up to three passes.
@lru_cache(maxsize=64)
def _search(layer: Layer, data: bool, weights: bool) -> _Search:
    return _Search(layer, data, weights)


def plan(problem: Any, device: Device, kernels: bool) -> ChunkPlan:
    """The chunks of ``problem``, a ``planning.Problem`` of an FFN; ``kernels`` says what computes them."""
    p = problem
    layer = Layer(
        p.K, p.N, p.O, p.dtype, p.element_bytes, p.gated, p.dropout, p.workspace_limit, kernels, device.kind,
        device.processors, device.figures.chunk_costs,
    )  # fmt: skip
    forward = p.N * _forward_bytes(layer)
    rows = _rows(p.M, p.workspace_limit // forward)
    passes = _passes(layer, p.M, p.needs_data_gradient, p.needs_weight_gradient)
    used = [_search(layer, each.data, each.weights).memory.bytes(each, p.M) for each in passes]
    return ChunkPlan(rows, passes, max([rows * forward, *used]))


def _passes(layer: Layer, tokens: int, data: bool, weights: bool) -> tuple[ChunkPass, ...]:
    if not (data or weights):
        return ()
    cost, together = _search(layer, data, weights).cheapest(tokens)
    if not (data and weights):
        return (together or ChunkPass(1, 1, 1, data, weights),)
    # Each with a pass of its own, which computes the hidden and its gradient once more.
    if together is None:
        _, first = _search(layer, True, False).cheapest(tokens)
        _, second = _search(layer, False, True).cheapest(tokens)
        return first or ChunkPass(1, 1, 1, True, False), second or ChunkPass(1, 1, 1, False, True)
    again = 2.0 * tokens * layer.N * (layer.parts * layer.K + layer.O) / layer.costs.flops_for_a_byte
    # What both may cost; often one pass alone costs more, and the other is not looked for.
    left = cost / APART_FROM - again
    cost, first = _search(layer, True, False).cheapest(tokens, left)
    if first is None:
        return (together,)
    _, second = _search(layer, False, True).cheapest(tokens, left - cost)
    return (together,) if second is None else (first, second)


def _cuts(layer: Layer, data: bool, weights: bool) -> list[Cut]:
    """Every cut that is tried."""
    # dx alone needs no groups: there are no sums whose memory they would share out.
    most_rounded = layer.N if not data else MOST_GROUPS[layer.gated] if weights else 1
    ways = [(most_rounded, False)]
    if layer.kernels and data and weights and layer.dtype in SIXTEEN_BITS:
        ways.append((layer.N, True))
    # Every number of groups up to 64, then those that double: a very wide layer has too many to try.
    numbers = [*range(1, 65), *(2**power for power in range(7, layer.N.bit_length()))]
    return [
        Cut(columns, slice_columns, data, weights, carried)
        for most_groups, carried in ways
        for columns in sorted({_columns(layer.N, groups) for groups in numbers if groups <= most_groups}, reverse=True)
        for slice_columns in sorted({_columns(columns, slices) for slices in SLICES}, reverse=True)
        if not (carried and columns == layer.N)
    ]


def _memory(layer: Layer, weights: bool) -> _Memory:
    narrow, parts = layer.dtype in SIXTEEN_BITS, layer.parts
    element = parts * layer.element_bytes
    sums = 4 * (parts * layer.K + layer.O) if weights and narrow else 0
    # float32, of all hidden units and of a slice.
    biases = 8 * parts * weights
    # Four bits for each element of dx, whole bytes in a row.
    carried = math.ceil(layer.K / 2)
    if layer.kernels:
        # The hidden, and partial sums of every 64 rows or more, in 32 bits every 32.
        of_slice = (layer.element_bytes + parts / (16 if narrow else 8)) * weights
        return _Memory(element, of_slice, 0, biases, sums, carried)
    of_slice = _torch_bytes(layer, BACKWARD_COPIES)
    if not (narrow and weights and layer.device_kind != "cuda"):
        return _Memory(element, of_slice, 0, biases, sums, carried)
    # Without a product of 16-bit operands that adds to float32, both operands and the product are float32.
    widest = 4 * max(layer.K, layer.O)
    return _Memory(element + 4, of_slice + 4, widest, biases, sums + widest, carried)


def _forward_bytes(layer: Layer) -> int:
    """Temporary memory of the forward pass for each element of the hidden."""
    return layer.element_bytes if layer.kernels else _torch_bytes(layer, FORWARD_COPIES)


def _torch_bytes(layer: Layer, copies: dict[bool, int]) -> int:
    """The same where torch's operations compute a chunk, forward or backward."""
    dropout = DROPOUT_COPIES * layer.element_bytes if layer.device_kind == "cuda" else MASK_BYTES
    return copies[layer.gated] * layer.element_bytes + dropout * layer.dropout


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
