"""How the rows of experts are padded, and the generic tiles of products, by architecture and dtype. Plain data."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GroupedTiles:
    """``block_m × block_n`` of the result for each program, from ``block_inner`` of the inner axis at a time.

    Rows of experts are those of one expert. Of a weight gradient ``block_m`` and ``block_n`` are rows and columns of
    the weight, and the inner axis is that of the rows, of all or of an expert's.
    """

    block_m: int
    block_n: int
    block_inner: int
    num_warps: int
    num_stages: int


# Every expert's rows begin at a multiple of one of these. Where a backward pass will run it is the last one, which the
# kernels of every kind take; else the smallest that holds an expert's share of the rows, as few rows are padded then.
BLOCKS = (16, 64, 128)

# By (architecture, bits of an element); architectures without a row take that of "other".
GROUPED_TILES: dict[tuple[str, int], GroupedTiles] = {
    ("sm_90", 16): GroupedTiles(128, 128, 64, 8, 3),
    ("other", 16): GroupedTiles(64, 64, 32, 4, 2),
    ("other", 32): GroupedTiles(32, 32, 32, 4, 1),
}
# Columns of a tile with two sums, both projections of a gated hidden: more of them have no registers.
WIDEST_OF_TWO = 64
# With few rows for each expert a program waits for its weights: many bytes are on their way at once. By
# (architecture, bits, block).
FEW_ROWS_TILES: dict[tuple[str, int, int], GroupedTiles] = {
    ("sm_90", 16, 16): GroupedTiles(16, 64, 128, 4, 4),
    ("sm_90", 16, 64): GroupedTiles(64, 64, 64, 4, 3),
    ("other", 16, 16): GroupedTiles(16, 64, 64, 4, 2),
    ("other", 32, 16): GroupedTiles(16, 32, 64, 4, 2),
}


def row_block(rows: int, experts: int, training: bool) -> int:
    """What every expert's rows are padded to a multiple of, for so many ``rows`` in all."""
    if training:
        return BLOCKS[-1]
    return next((block for block in BLOCKS if block * experts >= rows), BLOCKS[-1])


def padded_rows(rows: int, experts: int, block: int) -> int:
    """The most rows that padding makes of ``rows``, whichever expert has them."""
    return (rows + experts * (block - 1)) // block * block


def product_tiles(architecture: str, bits: int) -> GroupedTiles:
    """The generic kernels' tiles for operands of ``bits`` bits and many rows."""
    return GROUPED_TILES.get((architecture, bits)) or GROUPED_TILES["other", bits]


def grouped_tiles(architecture: str, bits: int, step: str, block: int) -> GroupedTiles:
    """Those of a step of experts whose rows are in blocks of ``block``; a "wide" step has two sums."""
    few = FEW_ROWS_TILES.get((architecture, bits, block)) or FEW_ROWS_TILES.get(("other", bits, block))
    if step != "weight_gradient" and few is not None:
        return few
    tiles = product_tiles(architecture, bits)
    return replace(tiles, block_n=min(tiles.block_n, WIDEST_OF_TWO)) if step == "wide" else tiles
