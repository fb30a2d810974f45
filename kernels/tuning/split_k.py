"""Split products: architecture, dtype and sizes -> tiles, and how their partials are added up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitTiles:
    """``block_m × block_n`` of the result for each program, from ``block_k`` of the inner axis at a time.

    A ``block_m`` of 1 is the kernel of a single row. ``swapped`` multiplies the tiles the other way round, so that the
    columns of the result fill the rows of a matrix instruction. ``programs`` per processor are enough to keep memory
    busy; a range of the inner axis has ``shortest_split`` blocks or more.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 1
    shortest_split: int = 2
    swapped: bool = False


# By (architecture, bits of an element); architectures without a row take that of "other".
TABLE: dict[tuple[str, int], SplitTiles] = {
    ("other", 16): SplitTiles(32, 64, 64, 4, 3, programs=2),
    ("other", 32): SplitTiles(32, 32, 32, 4, 1, programs=4, shortest_split=4),
}


def split_tiles(architecture: str, bits: int, rows: int, columns: int, inner: int) -> SplitTiles:
    """The tiles of a product ``[rows, inner] [columns, inner]ᵀ`` of operands of ``bits`` bits."""
    if rows == 1:
        return SplitTiles(1, 4, 256, 4, 1, programs=8)
    return TABLE.get((architecture, bits)) or TABLE[("other", bits)]


def reduce_blocks(outputs: int, splits: int) -> tuple[int, int, int]:
    """Sums of one program, partials of each at a time, and warps, for so many outputs of so many partials."""
    block = 16 if outputs <= 1024 else 32 if outputs <= 16384 else 128
    return block, max(1, min(1 << (splits - 1).bit_length(), 4096 // block)), 4
