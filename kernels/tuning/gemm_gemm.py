"""GEMM-GEMM and the narrow FFN: kernel, architecture, dtype and width -> tile configuration.

A width is ``max(K, O)`` padded to a power of two: it decides what fits on chip. Rows of ``sm_90`` were measured on an
H200; rows of other architectures are conservative ones.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .limits import CONSUMER_ROWS, MOST_STAGES, padded_width, sm90_width, stages_that_fit

# Up to this width the forward pass keeps 64 rows of x in 32 registers, and stages y in shared memory; wider rows stay
# in shared memory, where y overwrites them.
WIDEST_X_IN_REGISTERS = 128
# Large blocks may pad the hidden units by up to one in this many more than small blocks.
PADDED_ONE_IN = 10
# A shorter split of a weight gradient, in row tiles, spends more time on its partial than on its products.
SHORTEST_SPLIT = 4


@dataclass(frozen=True)
class Sm90Config:
    """An sm90 kernel: its consumers of 64 rows each, and their ring.

    A stage holds the weights of ``block`` hidden units, or in the weight gradient, whose consumers have 64 hidden units
    each, ``block`` rows. ``row_stages`` is the depth of the data gradient's ring of rows, ``passes`` that of
    :class:`TileConfig`. Kernels are persistent with at most ``programs`` programs; the weight gradient has one program
    per tile and split.
    """

    block: int
    consumers: int
    stages: int
    programs: int
    row_stages: int = 1
    passes: int = 1

    def row_tiles(self, rows: int) -> int:
        """The number of tiles for so many rows."""
        return -(-rows // (CONSUMER_ROWS * self.consumers))


@dataclass(frozen=True)
class StoredConfig:
    """A backward pass that writes the hidden and its gradient to memory once, for the products that read them.

    The first kernel computes blocks of ``block`` hidden units from pieces of the weights, in rings of ``up_stages`` and
    ``down_stages``, with ``out_tiles`` staging buffers per consumer. The second one computes 64 units per consumer ×
    ``block_columns`` of a weight gradient, from ``rows`` rows in each stage.
    """

    up_stages: int
    down_stages: int
    out_tiles: int
    programs: int
    block: int = 64
    piece: int = 128
    consumers: int = 2
    block_columns: int = 256
    rows: int = 64
    stages: int = 4

    def weight_tiles(self, projections: int, K: int, N: int, O: int) -> int:
        """Tiles of all weight gradients together: the programs of one split."""
        units = self.consumers * CONSUMER_ROWS
        up = -(-N // units) * -(-K // self.block_columns)
        return projections * up + -(-O // units) * -(-N // self.block_columns)


@dataclass(frozen=True)
class TileConfig:
    """Tile rows and columns of one kernel, its warps, and the depth of its software pipeline.

    ``passes``: the number of launches over which weight gradients are distributed, as each gradient's accumulator takes
    registers. ``sm90`` is the configuration of the sm90 kernel, which runs if TMA can read the operands.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    passes: int = 1
    sm90: Sm90Config | None = None


def padded_widths(width: int, out_width: int) -> tuple[int, int]:
    """The padded widths of the tiles of x and of y, neither below a quarter of the other.

    Triton 3.6 compiles lopsided tiles wrongly on sm_90: 256 by 16 columns with 8 warps gave wrong sums.
    """
    padded, out_padded = padded_width(width), padded_width(out_width)
    return max(padded, out_padded // 4), max(out_padded, padded // 4)


# The widths of the rows of all tables; layers wider than the last row do not fit on chip.
_WIDTHS = (64, 128, 256)
# (largest padded width, configuration), narrowest first.
_Rows = tuple[tuple[int, TileConfig], ...]


def _rows(*configurations: tuple[Any, ...]) -> _Rows:
    """Rows of increasing width: tile rows and columns, warps, stages and, unless it is one, passes."""
    widths = _WIDTHS[: len(configurations)]
    return tuple([(width, TileConfig(*given)) for width, given in zip(widths, configurations, strict=True)])


_SMALL_16_BIT = {
    "forward": _rows((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    "data_gradient": _rows((64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    "weight_gradient": _rows((32, 32, 4, 2), (32, 32, 4, 1, 2), (16, 16, 4, 1, 3)),
}

# By (architecture, bits of an element, gated); architectures without rows of their own take those of "other". Comments
# have the microseconds of sm_90 at 131072 tokens (width 256: 65536), bfloat16, gelu_tanh, gated silu, Triton 3.6. Not
# used: configurations that spill registers, 64 rows with 8 warps (one gave wrong results), and 128 rows with 64 columns
# at ragged widths (wrong in forward at 256 and in the gated data gradient).
TABLE: dict[tuple[str, int, bool], dict[str, _Rows]] = {
    ("sm_90", 16, False): {
        "forward": _rows((128, 32, 4, 3), (128, 32, 8, 3), (64, 32, 4, 2)),  # 40, 105, 223
        "data_gradient": _rows((64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 2)),  # 53, 163, 317
        "weight_gradient": _rows((32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 8, 2, 2)),
    },
    ("sm_90", 16, True): {
        "forward": _rows((128, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 2)),  # 48, 107, 249
        "data_gradient": _rows((64, 32, 4, 3), (64, 32, 4, 2), (128, 32, 8, 2)),  # 69, 215, 334
        "weight_gradient": _rows((32, 64, 4, 3), (64, 128, 8, 2, 3), (16, 64, 8, 2, 3)),  # 101, 340
    },
    ("other", 16, False): _SMALL_16_BIT,
    ("other", 16, True): _SMALL_16_BIT,
    # IEEE float32 has no matrix instruction: small tiles, so that the operands fit in registers.
    ("other", 32, False): {
        "forward": _rows((32, 32, 4, 1), (32, 16, 4, 1)),
        "data_gradient": _rows((32, 32, 4, 1), (16, 16, 4, 1)),
        "weight_gradient": _rows((16, 32, 8, 1), (16, 16, 8, 1)),
    },
    ("other", 32, True): {
        "forward": _rows((16, 16, 4, 1), (16, 16, 4, 1)),
        "data_gradient": _rows((16, 16, 4, 1), (16, 16, 8, 1)),
        "weight_gradient": _rows((16, 16, 4, 1), (16, 16, 4, 1)),
    },
}


def rows(kernel: str, architecture: str, bits: int, gated: bool) -> _Rows:
    """The rows of ``kernel`` for an architecture and operands of ``bits`` bits, narrowest first."""
    return (TABLE.get((architecture, bits, gated)) or TABLE[("other", bits, gated)])[kernel]


def tile_config(kernel: str, architecture: str, bits: int, gated: bool, width: int) -> TileConfig | None:
    """The configuration of ``kernel`` for an unpadded ``width``, the larger of K and O, or None if it does not fit."""
    fitting = (each for most, each in rows(kernel, architecture, bits, gated) if padded_width(width) <= most)
    return next(fitting, None)


class _Sm90(NamedTuple):
    """For one width, the larger of K and O: the large block, and the small one if that needs too much padding."""

    block: int
    small_block: int
    passes: int = 1
    consumers: int = 2


# By (kernel, gated), one for each of the widths. Comments have microseconds on an H200 at the tokens above, in brackets
# for batched products of 64 × 1024 × 1024. Only weight gradients of several passes spill a few registers; what spills
# none was slower: 424 (width 256, block 16), 252 (gated 128, three passes), 778 (gated 256).
_PIPELINED: dict[tuple[str, bool], tuple[_Sm90, _Sm90, _Sm90]] = {
    ("forward", False): (_Sm90(128, 64), _Sm90(128, 64), _Sm90(64, 32)),  # 36 (29), 72 (51), 124
    ("forward", True): (_Sm90(64, 64), _Sm90(64, 32), _Sm90(32, 32)),  # 26, 59, 137
    ("data_gradient", False): (_Sm90(64, 64), _Sm90(64, 32), _Sm90(32, 16)),  # 60 (40), 122 (63), 220
    ("data_gradient", True): (_Sm90(64, 64), _Sm90(32, 32), _Sm90(16, 16)),  # 39, 117, 294
    ("weight_gradient", False): (_Sm90(64, 32), _Sm90(32, 32), _Sm90(32, 32, 2)),  # 54 (62), 143 (124), 317
    ("weight_gradient", True): (_Sm90(32, 32), _Sm90(32, 32, 2), _Sm90(32, 32, 3, consumers=1)),  # 65, 201, 534
}


@lru_cache(1024)
def sm90_config(kernel: str, gated: bool, batch: int, M: int, K: int, N: int, O: int, sms: int) -> Sm90Config | None:
    """The sm90 configuration of ``kernel``, or None if it does not support these sizes.

    Tiles of x and y have 64 or 128 columns, padded with zeros, or both have 256 without padding: padded, the path for
    wider layers was as fast. TMA copies must not read the next batch entry: with a batch, tiles must be whole.
    """
    widest = max(K, O)
    wide = widest > 128
    padded = not (wide or (K in (64, 128) and O in (64, 128)))
    if N % 8 or K % 8 or O % 8 or (wide and not K == O == 256) or (padded and batch > 1):
        return None
    width, out_width = sm90_width(K), sm90_width(O)
    row = _PIPELINED[(kernel, gated)][_WIDTHS.index(sm90_width(widest))]
    consumers, row_stages, projections = row.consumers, 1, 2 if gated else 1
    if kernel == "weight_gradient":
        # Few rows always take the small block, which saves a variant.
        whole = M % row.block == 0 and (batch > 1 or M > SHORTEST_SPLIT * row.block)
        block = row.block if whole else row.small_block
        inside = M % block == 0
        kept, streamed = projections * width + out_width, width + out_width
    else:
        # With equal padding, small blocks took 1.05 to 1.35 times as long as large ones.
        more_padding = -N % row.block - -N % row.small_block
        large = N % row.block == 0 or (batch == 1 and row.block < N and PADDED_ONE_IN * more_padding <= N)
        block = row.block if large else row.small_block
        whole_tiles, half_tiles = batch * -(-M // (2 * CONSUMER_ROWS)), batch * -(-M // CONSUMER_ROWS)
        if half_tiles <= sms or (batch > 1 and M % (2 * CONSUMER_ROWS) and whole_tiles < sms):
            consumers = 1  # tiles of half the height give twice as many SMs work
        inside = M % (consumers * CONSUMER_ROWS) == 0 and N % block == 0
        if kernel == "data_gradient" and not wide:
            row_stages = 2
        in_place = kernel == "forward" and width > WIDEST_X_IN_REGISTERS
        kept, streamed = width if in_place else (width + out_width) * row_stages, projections * width + out_width
    if batch > 1 and not inside:
        return None
    # Columns of each 64 rows or hidden units that stay on chip take buffers of 64 × 64.
    stages = stages_that_fit(streamed, block, consumers * kept // CONSUMER_ROWS, MOST_STAGES)
    return Sm90Config(block, consumers, stages, sms, row_stages, row.passes)


def stored_config(
    gated: bool, K: int, N: int, O: int, sms: int, triton_release: tuple[int, ...]
) -> StoredConfig | None:
    """The backward pass that stores the hidden on Hopper, or None if it was not faster than recomputing twice.

    At width 256 the accumulators of all weight gradients take two or three passes, each of which recomputes. Both
    kernels took 148 and 131 µs at the tokens above; gated 172 and 134.
    """
    if not K == O == 256 or N % 8:
        return None
    if gated and triton_release >= (3, 9):
        return None  # Triton's assembler (ptxas 13.4) serialises the first kernel's wgmmas
    up_stages, down_stages, out_tiles = (6, 3, 1) if gated else (4, 4, 2)
    return StoredConfig(up_stages, down_stages, out_tiles, sms)
