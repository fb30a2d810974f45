"""What a chunk of an FFN's backward pass costs, by its rows: everything else is worked out once per layer.

Every new number of tokens is planned while a user waits, so that only what depends on it is left for then.
"""

import math
from typing import NamedTuple

from .measured import ChunkCosts

# Rows and columns of tiles: those of cuBLAS's large products, and those of the kernels and of what is added to float32
# sums, which were not seen to be computed in larger ones, nor in ranges of the tokens. Two shapes of the same size.
LARGE_TILES = ((128, 256), (256, 128))
SMALL_TILES = ((128, 128), (128, 128))


class Layer(NamedTuple):
    """An FFN and the device that it runs on: all that its chunks depend on besides the number of tokens."""

    K: int
    N: int
    O: int
    dtype: str
    element_bytes: int
    gated: bool
    dropout: bool
    workspace_limit: int
    kernels: bool  # whether kernels compute the chunks, or torch's operations
    device_kind: str
    processors: int
    costs: ChunkCosts

    @property
    def parts(self) -> int:
        """Products with x for each hidden unit."""
        return 2 if self.gated else 1


class Cut(NamedTuple):
    """How the hidden is cut, and which gradients a chunk of it yields; ``carried`` as in a ``ChunkPass``."""

    columns: int
    slice_columns: int
    data: bool
    weights: bool
    carried: bool = False


class ChunkCost(NamedTuple):
    """What a chunk costs, roughly, in bytes that the device could move meanwhile.

    Of the products whose tiles depend on the rows, ``waves`` has what a wave of tiles computes, and for either of two
    tile shapes its height and how many tiles lie beside one another; ``computed`` is what each row needs of the waves.
    The rest of them is computed by processors that would be idle: ``fixed + rows * each_row`` is not above the cost.
    """

    fixed: float
    each_row: float
    computed: float
    waves: tuple[tuple[float, int, int, int, int], ...]
    processors: int

    def of(self, rows: int) -> float:
        """The cost of a chunk of so many rows."""
        total, processors = self.fixed + rows * (self.each_row - self.computed), self.processors
        # Written out, as this is computed for several cuts whenever there is a new number of tokens.
        for wave, height, beside, other_height, other_beside in self.waves:
            tiles, others = -(-rows // height) * beside, -(-rows // other_height) * other_beside
            total += wave * -(-(tiles if tiles < others else others) // processors)
        return total


def chunk_cost(layer: Layer, cut: Cut, whole: bool) -> ChunkCost:
    """The cost of a chunk but for what is the same however the hidden is cut; ``whole``: it has all tokens."""
    parts, element, processors, costs = layer.parts, layer.element_bytes, layer.processors, layer.costs
    K, O, columns, part = layer.K, layer.O, cut.columns, cut.slice_columns
    slices = math.ceil(columns / part)
    first, down = parts * columns * K, columns * O
    # The pre-activations; their gradients.
    launches = parts + slices
    elements, row_elements = first + down, K + slices * O
    products = [(parts, columns, K, LARGE_TILES), (slices, part, O, SMALL_TILES)]
    sums: float = 0
    row_sums: float = 0
    if cut.data:
        rounded = 1 if cut.carried else parts
        launches += rounded
        elements += first
        row_elements += 2 * rounded * K
        row_sums += K * cut.carried
        products.append((parts, K, columns, SMALL_TILES if cut.carried else LARGE_TILES))
    if cut.weights:
        launches += parts + slices
        row_elements += parts * K + slices * O
        sums += 2 * (first + down) * (element if whole else max(4, element))
        for count, height, width in ((parts, columns, K), (slices, O, part)):
            ranges = _ranges(height, width, processors) if whole else 1
            sums += count * 2 * 4 * height * width * (ranges if ranges > 1 else 0)
            idle = _idle_elements(height, width, processors, LARGE_TILES if whole else SMALL_TILES, ranges)
            row_sums += count * 2 * idle / costs.flops_for_a_byte
    waves = []
    for count, width, inner, tiles in products:
        (height, across), (other_height, other_across) = tiles
        wave = 2 * count * inner * processors * height * across / costs.flops_for_a_byte
        waves.append((wave, height, math.ceil(width / across), other_height, math.ceil(width / other_across)))
    computed = sum(2 * count * width * inner for count, width, inner, _ in products) / costs.flops_for_a_byte
    fixed = launches * costs.launch_bytes + elements * element + sums
    return ChunkCost(fixed, row_elements * element + row_sums, computed, tuple(waves), processors)


def _ranges(rows: int, columns: int, processors: int) -> int:
    """Ranges of the inner axis that together fill the processors, where the large tiles of a product do not."""
    return max(1, processors // min(_tiles(rows, columns, tile) for tile in LARGE_TILES))


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])


def _idle_elements(rows: int, columns: int, processors: int, tiles: tuple[tuple[int, int], ...], ranges: int) -> float:
    """What the processors without a tile could compute, while those that have one finish a product."""
    idle = []
    for tile in tiles:
        waves = math.ceil(_tiles(rows, columns, tile) * ranges / processors)
        idle.append(waves * processors * tile[0] * tile[1] / ranges - rows * columns)
    return max(0, min(idle))
