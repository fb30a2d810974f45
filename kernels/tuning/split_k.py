"""Split products: architecture, dtype and sizes -> tiles, and the blocks of the sums of partials."""

from dataclasses import dataclass

from .grouped_gemm import GroupedTiles


@dataclass(frozen=True)
class SplitTiles(GroupedTiles):
    """A ``block_m`` of 1 means the kernel of a single row.

    ``swapped`` exchanges the operands, so that the columns of the result fill the rows of a matrix instruction.
    ``programs`` per SM are enough to saturate memory; a range of the inner axis has ``shortest_split`` blocks or more.
    """

    programs: int = 1
    shortest_split: int = 2
    swapped: bool = False


_ROW = SplitTiles(1, 1, 2048, 4, 1, programs=8, shortest_split=1)
_ROWS_OF_4 = SplitTiles(1, 4, 2048, 4, 1, programs=4, shortest_split=1)
_ROWS_OF_8 = SplitTiles(1, 8, 1024, 4, 1, programs=4, shortest_split=1)
_SMALL = SplitTiles(16, 32, 128, 4, 6)
_FLAT = SplitTiles(16, 64, 128, 4, 6, swapped=True)
_UPRIGHT = SplitTiles(64, 16, 128, 4, 6)
_NARROW = SplitTiles(64, 32, 128, 4, 6)
_SQUARE = SplitTiles(64, 64, 64, 4, 6, shortest_split=3)

# By (architecture, bits of an element): (most rows, most columns, tiles), of which the first that fits is taken.
# Architectures without rows of their own take those of "other", which are not measured. For 360 random products on an
# H100 in bfloat16, in a CUDA graph with up to 24 tiles and five splits each, these took on average 1.02 times as long
# as the fastest up to 64 rows or columns, at most 1.14 times, but for one (1.36 at 2 × 25 × 824,896).
_ANY = 2**31
TABLE: dict[tuple[str, int], tuple[tuple[int, int, SplitTiles], ...]] = {
    ("sm_90", 16): (
        (1, 16, _ROW),
        (1, 2048, _ROWS_OF_4),
        (1, _ANY, _ROWS_OF_8),
        (16, 32, _SMALL),
        (16, _ANY, _FLAT),
        (_ANY, 16, _UPRIGHT),
        (_ANY, 200, _NARROW),
        (_ANY, 3584, _SQUARE),
        (_ANY, _ANY, _NARROW),
    ),
    ("other", 16): (
        (1, _ANY, SplitTiles(1, 4, 256, 4, 1, programs=8)),
        (_ANY, _ANY, SplitTiles(32, 64, 64, 4, 3, programs=2)),
    ),
    ("other", 32): (
        (1, _ANY, SplitTiles(1, 4, 256, 4, 1, programs=8)),
        (_ANY, _ANY, SplitTiles(32, 32, 32, 4, 1, programs=4, shortest_split=4)),
    ),
}


def split_tiles(architecture: str, bits: int, rows: int, columns: int) -> SplitTiles:
    """The tiles of a product with ``rows × columns`` results, of operands of ``bits`` bits."""
    table = TABLE.get((architecture, bits)) or TABLE["other", bits]
    return next(tiles for most_rows, most_columns, tiles in table if rows <= most_rows and columns <= most_columns)


def reduce_blocks(outputs: int, splits: int) -> tuple[int, int, int]:
    """(sums per program, partials loaded at a time, warps) for so many outputs of so many partials.

    Many partials take as many programs as there are SMs, each with all of its loads in flight: on an H200 the sum of
    128 partials of 64 × 64 results then takes 1.3 µs in a graph.
    """
    if splits <= 16:
        block = 256  # 8 partials of 16 × 1024 results: 5.1 µs with the product, whatever the block
    else:
        block = 16 if outputs <= 1024 else 32 if outputs <= 8192 else 64 if outputs <= 2**17 else 256
    return block, max(1, min(1 << (splits - 1).bit_length(), 8192 // block)), 4
