"""The wide FFN's products with epilogues: (architecture, bits, gated) -> tiles, and the pipelines of sm90 kernels."""

import math
from dataclasses import dataclass
from typing import ClassVar

from .limits import CONSUMER_ROWS, stages_that_fit

# Bytes of a memory sector, the unit of memory accesses. Rows that began within a sector took twice as long to store,
# 257 instead of 134 µs for 18,368 × 2472, gated, and 2,530 instead of 1,320 for 81,536 × 8344, on an H100; and cuBLAS
# took up to 1.6 times as long to read them.
SECTOR = 32


def hidden_stride(columns: int, element_bytes: int) -> int:
    """The row stride, in elements, of hidden units that only products read: rounded up to whole sectors."""
    unit = SECTOR // element_bytes
    return -(-columns // unit) * unit


def gradients_joined(rows: int, columns: int, element_bytes: int) -> bool:
    """Whether dz and dz_gate ``[rows, columns]``, if only products read them, are halves of one matrix.

    Then dx is one product, rounded once and not read again. The weights are copied for it, which costs less than
    reading dx if they have fewer rows.
    """
    return 2 * columns < rows and hidden_stride(columns, element_bytes) == columns


@dataclass(frozen=True)
class EpilogueTiles:
    """The generic kernels: a program computes ``block_m × block_n`` of the result in steps of ``block_inner``.

    With a ``block_inner`` of 0 torch computes the product, and the kernel only its epilogue; in the hidden's gradient
    about ``programs`` programs per SM have several tiles each.
    """

    block_m: int
    block_n: int
    block_inner: int
    num_warps: int
    num_stages: int
    programs: int = 0


@dataclass(frozen=True)
class EpiloguePipeline:
    """The sm90 kernels: two consumers in ping-pong, each with tiles of 128 × 128.

    The ring has ``stages`` of ``step`` along the inner axis: as many as fit, up to ``most_stages``. Each consumer has
    ``slots`` staging buffers of 64 × 64 for results and ``z_stages`` of that size for pre-activations. Tiles are
    swizzled in groups of ``group`` tile rows. Kernels are persistent, with at most ``programs`` programs. ``stays``: a
    program of the ungated hidden's gradient has tiles of one column, and keeps its sums on chip. Operands have ``bits``
    bits, results 16.
    """

    slots: int = 2
    z_stages: int = 0
    step: int = 64
    group: int = 8
    programs: int = 132
    stays: bool = False
    most_stages: int = 8
    bits: int = 16

    tile: ClassVar[tuple[int, int]] = (2 * CONSUMER_ROWS, 2 * CONSUMER_ROWS)

    @property
    def stages(self) -> int:
        """Stages of the ring that fit beside the staging buffers and pre-activations of both consumers."""
        buffers = 2 * (self.slots + self.z_stages)
        return stages_that_fit(sum(self.tile), self.step, buffers, self.most_stages, self.bits)

    @property
    def low_rank_step(self) -> int:
        """A step of the 16-bit operands of a low-rank product, which has as many bytes."""
        return self.step * self.bits // 16

    @staticmethod
    def tiles(rows: int, columns: int) -> tuple[int, int]:
        """(tile rows, tile columns) of a result of this size."""
        tile = 2 * CONSUMER_ROWS
        return math.ceil(rows / tile), math.ceil(columns / tile)

    def programs_for_columns(self, tile_columns: int) -> int:
        """The number of programs if they stay in their column of tiles: equally many per column."""
        return self.programs // tile_columns * tile_columns

    def bands(self, rows: int, columns: int, gated: bool) -> int:
        """Bands of rows whose sums the gradient stores: one per tile row, two with a gate.

        If programs stay, which takes several tile rows, one per consumer in a column of tiles.
        """
        tile_rows, tile_columns = self.tiles(rows, columns)
        if gated:
            return 2 * tile_rows
        return 2 * min(tile_rows, self.programs // tile_columns) if self.stays and tile_rows > 1 else tile_rows


# By (architecture, bits of an element, gated); architectures without a row take that of "other". A gate needs a second
# accumulator: with it, 128 columns spilled.
EPILOGUE_TILES: dict[tuple[str, int, bool], EpilogueTiles] = {
    ("sm_90", 16, False): EpilogueTiles(128, 128, 64, 8, 3),
    ("sm_90", 16, True): EpilogueTiles(128, 64, 32, 8, 3),
    ("other", 16, False): EpilogueTiles(64, 64, 32, 4, 2),
    ("other", 16, True): EpilogueTiles(64, 64, 32, 4, 2),
    ("other", 32, False): EpilogueTiles(32, 32, 32, 4, 1),
    ("other", 32, True): EpilogueTiles(32, 32, 32, 4, 1),
}

# With dropout, by bits of an element: larger tiles spilled, as drawing a mask takes many registers. Not measured.
EPILOGUE_DROPOUT_TILES: dict[int, EpilogueTiles] = {
    16: EpilogueTiles(64, 64, 32, 8, 2),
    32: EpilogueTiles(32, 32, 32, 8, 1),
}

# Epilogues of torch's products, by gated. On an H100 the fastest of 8 to 32 rows, 64 to 256 columns and 4 to 16
# programs per SM, or within 2 % of it; 256 columns gained 3 % with a gate and lost 6 % without one (384 hidden units).
EPILOGUE_ELEMENTS: dict[bool, EpilogueTiles] = {
    False: EpilogueTiles(16, 128, 0, 4, 1, programs=8),
    True: EpilogueTiles(16, 256, 0, 8, 1, programs=4),
}

# Up to this many bytes of ungated weights the group is smaller: fewer and longer rows are stored at a time. On an H100
# the hidden took 129 instead of 138 µs (16,384 × 768 × 3072), 227 for 239 (16,384 × 1536 × 3072) and 374 for 404
# (65,536 × 640 × 2560), its gradient 1 to 4 % less; with 13 and 20 MB up to 3 % more, with 34 up to 11 % more.
FEW_WEIGHTS = 10 * 2**20
FEW_WEIGHTS_GROUP = 2

# By (kernel, gated). On an H200 in bfloat16 the fastest of 3 to 5 stages and 2 to 6 staging buffers, or within 2 % of
# it, from 512 to 4096 columns; from 2048 columns on more stages gain 5 %. A sixth stage was not measured.
EPILOGUE_PIPELINES: dict[tuple[str, bool], EpiloguePipeline] = {
    ("hidden", False): EpiloguePipeline(most_stages=5),
    ("hidden", True): EpiloguePipeline(most_stages=5),
    # A step has as many bytes as with 16-bit operands. On an H100 five stages were within 3 % of the fastest of 4 to 6,
    # and one staging buffer took up to 4 % longer. With groups of 4 the gated hidden in 8 bits took 1547 instead of
    # 1762 µs and the product of it 779 for 877 (8192 × 4096 × 14336), or 931 for 963 and 410 for 413 (16,384 × 2048 ×
    # 8192); groups of 2 took longer, and the gradient 1136 for 1026 with 4. Its stages were not measured.
    ("scaled_hidden", False): EpiloguePipeline(step=128, most_stages=5, bits=8),
    ("scaled_hidden", True): EpiloguePipeline(step=128, group=4, most_stages=5, bits=8),
    ("scaled_product", False): EpiloguePipeline(step=128, group=4, most_stages=5, bits=8),
    ("scaled_hidden_gradient", False): EpiloguePipeline(step=128, z_stages=2, bits=8),
    ("scaled_hidden_gradient", True): EpiloguePipeline(step=128, z_stages=4, bits=8),
    ("hidden_gradient", False): EpiloguePipeline(z_stages=2),
    ("hidden_gradient", True): EpiloguePipeline(z_stages=4),
    # Not measured: those of the hidden, whose epilogue is staged alike.
    ("data_gradient", False): EpiloguePipeline(most_stages=5),
    ("data_gradient", True): EpiloguePipeline(most_stages=5),
}


def epilogue_tiles(architecture: str, bits: int, gated: bool, dropout: bool = False) -> EpilogueTiles:
    """The generic kernels' tiles for operands of ``bits`` bits."""
    if dropout:
        return EPILOGUE_DROPOUT_TILES[bits]
    return EPILOGUE_TILES.get((architecture, bits, gated)) or EPILOGUE_TILES[("other", bits, gated)]
