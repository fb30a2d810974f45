"""Schedules: which tile a program owns, and which rows or which range of the inner axis belong to it."""

from ...device import tl, triton
from ...tiles import grouped_tile

# Rows of tiles in a swizzle group: they are computed before those to their right.
GROUP = tl.constexpr(8)


@triton.jit
def swizzled_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile row, tile column) of the ``tile``-th tile of a result ``[M, N]``, in swizzle groups of eight tile rows.

    In the L2 cache, tiles below one another share columns of the right operand, tiles side by side rows of the left.
    """
    return grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)


@triton.jit
def expert_of(tile_expert_ptr, slots_ptr, first, BLOCK: tl.constexpr):
    """The expert of the tile that begins at ``first``, of rows sorted in blocks of ``BLOCK``; 0 for dense rows.

    -1 past the last expert, and for a tile that begins with padding, which comes after all rows of an expert.
    """
    if tile_expert_ptr is None:
        return 0
    else:
        expert = tl.load(tile_expert_ptr + first // BLOCK).to(tl.int64)
        if expert >= 0:
            expert = tl.where(tl.load(slots_ptr + first) >= 0, expert, -1)
        return expert


@triton.jit
def end_of_rows(slots_ptr, first, M, BLOCK_M: tl.constexpr):
    """The end of the rows of the tile that begins at ``first``. Sorted rows come in whole tiles and need no mask."""
    if slots_ptr is None:
        return M
    else:
        return first + BLOCK_M
