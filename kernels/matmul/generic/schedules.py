"""Schedules: which tile a program owns, and which rows or which range of the inner axis belong to it."""

from ...device import tl, triton
from ...tiles import grouped_tile

# Tiles below one another that are computed before those to their right.
GROUP = tl.constexpr(8)


@triton.jit
def swizzled_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile row, tile column) of the ``tile``-th tile of a result ``[M, N]``: eight below one another first.

    They share columns of the right operand in the L2 cache, and the tiles to their right share rows of the left one.
    """
    return grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)


@triton.jit
def expert_of(tile_expert_ptr, slots_ptr, first, BLOCK: tl.constexpr):
    """The expert of a tile whose rows, sorted in blocks of ``BLOCK``, begin at ``first``; 0 of dense rows.

    -1 behind the last expert, and where the tile begins with padding: that is behind all rows of an expert.
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
    """Where the rows of the tile that begins at ``first`` end: sorted rows are whole tiles, and need no mask then."""
    if slots_ptr is None:
        return M
    else:
        return first + BLOCK_M
