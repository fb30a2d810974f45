"""Rows sorted by expert on the device: a counting sort that keeps the order of an expert's rows.

Slot ``s = token · k + j`` is the j-th choice of a token. The rows of an expert begin at a multiple of ``block``, so
that a tile of rows has a single expert; the rows in between are padding. Only the device knows their number: tensors
and grids have the largest possible size.
"""

from typing import Any, NamedTuple

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div, launch, prepared
from ..matmul.generic.operands import RowOrder
from ..tuning.grouped_gemm import padded_rows

_SLOTS = 128  # per chunk; a program counts or sorts a chunk
# With up to this many chunks every program counts all of them itself: one launch instead of three.
_COUNTED_AGAIN = 16
_CHUNKS_AT_ONCE = 256
_EXPERTS = 16  # per program of ``longest_first``
# int32 elements in 16 bytes, at multiples of which the parts of the packed tensor begin.
_ALIGNED = 4


class SortedRows(NamedTuple):
    """The slots of rows and the experts of tiles of rows, int32.

    ``slots`` ``[P]``: the slot of each row, -1 for padding. ``rows_of`` ``[S]``: the row of each slot, -1 if its index
    is no expert. ``tile_expert`` ``[P / block]``: the expert of every ``block`` rows, -1 past the last one. ``starts``
    ``[E + 1]``: the first row of each expert, and the end of all. Rows past that end are never read.
    """

    slots: torch.Tensor
    rows_of: torch.Tensor
    tile_expert: torch.Tensor
    starts: torch.Tensor
    block: int
    k: int

    @property
    def capacity(self) -> int:
        """P, the number of rows that operands are allocated for."""
        return self.slots.shape[0]

    def order(self, gathered: bool = True) -> RowOrder:
        """The order of rows as the generic kernels of ``matmul`` take it."""
        return RowOrder(self.block, self.k, gathered)


def _lengths(slots: int, experts: int, block: int) -> tuple[int, int, int, int]:
    """The lengths of the four tensors of :class:`SortedRows`."""
    capacity = padded_rows(slots, experts, block)
    return capacity, slots, capacity // block, experts + 1


def sizes(slots: int, experts: int, block: int) -> list[int]:
    """The lengths of the four parts of :class:`SortedRows`, each rounded up so that the next one is aligned."""
    return [ceil_div(length, _ALIGNED) * _ALIGNED for length in _lengths(slots, experts, block)]


def rows_of(packed: torch.Tensor, slots: int, experts: int, block: int, k: int) -> SortedRows:
    """The four parts of the packed tensor of :func:`sort`."""
    parts = zip(packed.split_with_sizes(sizes(slots, experts, block)), _lengths(slots, experts, block), strict=True)
    slots_of, row_of, tile_expert, starts = (part[:length] for part, length in parts)
    return SortedRows(slots_of, row_of, tile_expert, starts, block, k)


@triton.jit
def _chunk(index_ptr, chunk, slots, E, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """(slots of a chunk, their experts or -1, number of slots of each expert in the chunk)."""
    slot = chunk * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(index_ptr + slot, mask=slot < slots, other=-1)
    known = (expert >= 0) & (expert < E)
    expert = tl.where(known, expert, 0).to(tl.int32)
    return slot, tl.where(known, expert, -1), tl.histogram(expert, EXPERTS, mask=known)


@triton.jit(do_not_specialize=["slots"])
def _count_kernel(index_ptr, counts_ptr, E, slots, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    _, _, counts = _chunk(index_ptr, tl.program_id(0), slots, E, SLOTS, EXPERTS)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * E + experts, counts, mask=experts < E)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(counts_ptr, totals_ptr, E, chunks, BLOCK: tl.constexpr):
    """Replace each count of an expert by the sum of those before it, and store the sum of all: an exclusive scan."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        count_ptr = counts_ptr + expert + chunk.to(tl.int64) * E
        counts = tl.load(count_ptr, mask=chunk < chunks, other=0)
        tl.store(count_ptr, total + tl.cumsum(counts, 0) - counts, mask=chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["slots", "chunks"])
def _place_kernel(
    index_ptr, counts_ptr, totals_ptr, slots_ptr, rows_ptr, tile_expert_ptr, starts_ptr, E, slots, chunks,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The first programs sort a chunk of slots each; each of the others fills the padding of a tile of rows.
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    inside = experts < E
    if totals_ptr is not None:
        totals = tl.load(totals_ptr + experts, mask=inside, other=0)
        row_ptr = counts_ptr + tl.minimum(program, chunks - 1).to(tl.int64) * E
        before = tl.load(row_ptr + experts, mask=inside, other=0)
    else:
        totals = tl.zeros([EXPERTS], tl.int32)
        before = tl.zeros([EXPERTS], tl.int32)
        for chunk in range(chunks):
            _, _, counts = _chunk(index_ptr, chunk, slots, E, SLOTS, EXPERTS)
            totals += counts
            before += tl.where(chunk < program, counts, 0)
    padded = (totals + (BLOCK - 1)) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    if program < chunks:
        slot, expert, _ = _chunk(index_ptr, program, slots, E, SLOTS, EXPERTS)
        position = tl.arange(0, SLOTS)
        earlier = (expert[:, None] == expert[None, :]) & (position[:, None] > position[None, :])
        row = tl.gather(starts + before, tl.maximum(expert, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(slots_ptr + row, slot, mask=expert >= 0)
        tl.store(rows_ptr + slot, tl.where(expert >= 0, row, -1), mask=slot < slots)
    else:
        tile = program - chunks
        first = tile * BLOCK
        owner = tl.sum(((ends <= first) & inside).to(tl.int32), 0)
        tl.store(tile_expert_ptr + tile, tl.where(owner < E, owner, -1))
        rows = first + tl.arange(0, BLOCK)
        filled = tl.sum(tl.where(experts == owner, starts + totals, 0), 0)
        tl.store(slots_ptr + rows, tl.full([BLOCK], -1, tl.int32), mask=(rows >= filled) & (owner < E))
        if tile == 0:
            tl.store(starts_ptr + experts, starts, mask=inside)
            tl.store(starts_ptr + E, tl.sum(padded, 0))


@triton.jit
def _order_kernel(starts_ptr, order_ptr, E, ALL: tl.constexpr, EXPERTS: tl.constexpr):
    own = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    every = tl.arange(0, ALL)
    rows = tl.load(starts_ptr + own + 1, mask=own < E, other=0) - tl.load(starts_ptr + own, mask=own < E, other=0)
    others = tl.load(starts_ptr + every + 1, mask=every < E, other=-1)
    others -= tl.load(starts_ptr + every, mask=every < E, other=0)
    earlier = (others[None, :] == rows[:, None]) & (every[None, :] < own[:, None])
    rank = tl.sum((earlier | (others[None, :] > rows[:, None])).to(tl.int32), 1)
    tl.store(order_ptr + rank, own, mask=own < E)


def sort(
    index: torch.Tensor, experts: int, k: int, block: int, ready: dict[Any, Any] | None = None
) -> tuple[torch.Tensor, SortedRows]:
    """(packed tensor, its parts): the sorted rows of slots with the experts ``index`` ``[S]``, contiguous integers.

    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``.
    """
    slots = index.shape[0]
    width = 1 << max(experts - 1, 1).bit_length()
    chunks = ceil_div(slots, _SLOTS)
    count, scan, place = prepared(ready, "sort", lambda: _prepare(slots, experts, block, chunks, width))
    packed = index.new_empty(sum(sizes(slots, experts, block)), dtype=torch.int32)
    rows = rows_of(packed, slots, experts, block, k)
    counts = totals = None
    if chunks > _COUNTED_AGAIN:
        counts, totals = packed.new_empty(experts * chunks), packed.new_empty(experts)
        count((index, counts))
        scan((counts, totals))
    place((index, counts, totals, rows.slots, rows.rows_of, rows.tile_expert, rows.starts))
    return packed, rows


def _prepare(slots: int, experts: int, block: int, chunks: int, width: int) -> tuple[Launch, Launch, Launch]:
    tiles = padded_rows(slots, experts, block) // block
    return (
        Launch(_count_kernel, chunks, (experts,), (slots,), (_SLOTS, width)),
        Launch(_scan_kernel, experts, (experts,), (chunks,), (_CHUNKS_AT_ONCE,)),
        # More warps would only lengthen the reductions across them.
        Launch(_place_kernel, chunks + tiles, (experts,), (slots, chunks), (_SLOTS, width, block), num_warps=2),
    )


def longest_first(starts: torch.Tensor) -> torch.Tensor:
    """The experts ``[E]``, int32, by falling number of rows, from ``starts`` ``[E + 1]``; the sort is stable.

    The longest come first, so that no long tile starts last.
    """
    experts = starts.shape[0] - 1
    order = torch.empty_like(starts[1:])
    every = max(_EXPERTS, 1 << (experts - 1).bit_length())
    launch(_order_kernel, -(-experts // _EXPERTS), (starts, order), (experts,), (), (every, _EXPERTS))
    return order
