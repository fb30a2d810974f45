"""The padding of the rows of experts, and the generic tiles of products, by architecture and dtype."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GroupedTiles:
    """A program computes ``block_m × block_n`` of the result in steps of ``block_inner``.

    A tile of sorted rows has a single expert. In a weight gradient ``block_m`` and ``block_n`` are rows and columns of
    the weight, and the inner axis is the rows, all or those of an expert.
    """

    block_m: int
    block_n: int
    block_inner: int
    num_warps: int
    num_stages: int


# Every expert's rows begin at a multiple of one of these: the last one if a backward pass follows, as all kernels
# support it, else the smallest that holds an expert's share of the rows, for little padding.
BLOCKS = (16, 64, 128)

# By (architecture, bits of an element); architectures without a row take that of "other".
GROUPED_TILES: dict[tuple[str, int], GroupedTiles] = {
    ("sm_90", 16): GroupedTiles(128, 128, 64, 8, 3),
    ("other", 16): GroupedTiles(64, 64, 32, 4, 2),
    ("other", 32): GroupedTiles(32, 32, 32, 4, 1),
}
# Columns of a tile with two accumulators, both projections of a gated hidden: more would not fit in registers.
WIDEST_OF_TWO = 64
# With few rows per expert a program is bound by loading its weights: many bytes are in flight. By (architecture, bits,
# block).
FEW_ROWS_TILES: dict[tuple[str, int, int], GroupedTiles] = {
    ("sm_90", 16, 16): GroupedTiles(16, 64, 128, 4, 4),
    ("sm_90", 16, 64): GroupedTiles(64, 64, 64, 4, 3),
    ("other", 16, 16): GroupedTiles(16, 64, 64, 4, 2),
    ("other", 32, 16): GroupedTiles(16, 32, 64, 4, 2),
}


def row_block(rows: int, experts: int, training: bool) -> int:
    """The block that every expert's rows are padded to, for ``rows`` rows in all."""
    if training:
        return BLOCKS[-1]
    return next((block for block in BLOCKS if block * experts >= rows), BLOCKS[-1])


def padded_rows(rows: int, experts: int, block: int) -> int:
    """The largest number of padded rows, however ``rows`` are distributed over experts."""
    return (rows + experts * (block - 1)) // block * block


def product_tiles(architecture: str, bits: int) -> GroupedTiles:
    """The generic kernels' tiles for operands of ``bits`` bits and many rows."""
    return GROUPED_TILES.get((architecture, bits)) or GROUPED_TILES["other", bits]


def grouped_tiles(architecture: str, bits: int, step: str, block: int) -> GroupedTiles:
    """The tiles of a step whose rows are in blocks of ``block``; a "wide" step has two accumulators."""
    few = FEW_ROWS_TILES.get((architecture, bits, block)) or FEW_ROWS_TILES.get(("other", bits, block))
    if step != "weight_gradient" and few is not None:
        return few
    tiles = product_tiles(architecture, bits)
    return replace(tiles, block_n=min(tiles.block_n, WIDEST_OF_TWO)) if step == "wide" else tiles
