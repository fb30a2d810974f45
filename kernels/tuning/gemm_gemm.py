"""GEMM-GEMM and the narrow FFN: kernel, architecture, dtype and width -> tile configuration.

A width is ``max(K, O)`` padded to a power of two: it decides what fits on chip. Rows of ``sm_90`` were measured on an
H200; rows of other architectures are conservative ones.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .limits import CONSUMER_ROWS, MOST_STAGES, padded_width, sm90_width, stages_that_fit

# In the forward pass 64 rows of x take 32 registers up to here, and y has a place of its own in shared memory; wider
# ones stay there, and y takes their place.
WIDEST_X_IN_REGISTERS = 128
# Large blocks may compute one in so many hidden units more than small ones would.
PADDED_ONE_IN = 10
# A split of a weight gradient shorter than this many row tiles spends more on its partial than on its products.
SHORTEST_SPLIT = 4


@dataclass(frozen=True)
class Sm90Config:
    """A warp-specialised kernel: its consumers of 64 rows each, and the ring that a producer fills for them.

    A stage holds the weights of ``block`` hidden units; in the weight gradient, whose consumers have 64 hidden units
    each, ``block`` rows. ``row_stages`` is the depth of the data gradient's ring of rows, ``passes`` is that of a
    :class:`TileConfig`. At most ``programs`` programs run, each of which takes tile after tile; the weight gradient
    runs as many as it has tiles and splits.
    """

    block: int
    consumers: int
    stages: int
    programs: int
    row_stages: int = 1
    passes: int = 1

    def row_tiles(self, rows: int) -> int:
        """How many tiles of all consumers' rows hold so many rows."""
        return -(-rows // (CONSUMER_ROWS * self.consumers))


@dataclass(frozen=True)
class StoredConfig:
    """A backward pass that writes the hidden and its gradient to memory once, for the products that read them.

    The first kernel computes them in blocks of ``block`` hidden units from pieces of the weights, ``up_stages`` and
    ``down_stages`` of which are there at once, and sends them out of ``out_tiles`` places per consumer. The second one
    computes 64 units of each consumer × ``block_columns`` of a weight gradient, from ``rows`` rows in each stage.
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

    ``passes`` is for weight gradients alone: how many launches share out the gradients, each of which keeps an
    accumulator in registers. ``sm90`` is what runs instead where the operands lie as its copies need them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    passes: int = 1
    sm90: Sm90Config | None = None


def padded_widths(width: int, out_width: int) -> tuple[int, int]:
    """The widths of x's tile and of y's tile on chip: each padded, and neither below a quarter of the other.

    Triton 3.6 compiles lopsided tiles wrongly on sm_90: 256 by 16 columns with 8 warps gave wrong sums.
    """
    padded, out_padded = padded_width(width), padded_width(out_width)
    return max(padded, out_padded // 4), max(out_padded, padded // 4)


# Widths of the rows of all tables; wider layers than the last row of theirs do not fit on chip.
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

# By (architecture, bits of an element, gated); architectures without rows of their own take those of "other". Those of
# sm_90 were measured at 131072 tokens (width 256: 65536), bfloat16, gelu_tanh, gated silu, Triton 3.6; microseconds
# beside those that were. Left out: configurations that spill registers, those of 64 rows with 8 warps (one came out
# wrong), and those of 128 rows and 64 columns where the width is ragged (forward at 256 and the gated data gradient
# came out wrong there).
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
    """Up to one width, the larger of K and O: the large block, and the small one where that is padded too much."""

    block: int
    small_block: int
    passes: int = 1
    consumers: int = 2


# By (kernel, gated), one for each of the widths. Measured on an H200 at the tokens above, in microseconds beside them;
# in brackets for batched products of 64 × 1024 × 1024. None spills registers but the weight gradients of several
# passes, a few, where what does not was slower: 424 (width 256, block 16), 252 (gated 128, three passes), 778 (gated
# 256).
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
    """The warp-specialised configuration of ``kernel`` on Hopper, or None where it does not take these sizes.

    Tiles of x and y have 64 or 128 columns, padded with zeros, or both 256 without: the path for wider layers was as
    fast there. Copies of a batch's last tile must not reach into the next entry: with a batch, tiles must be whole.
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
        # Few rows take the small block whatever their number, which is one variant less to compile.
        whole = M % row.block == 0 and (batch > 1 or M > SHORTEST_SPLIT * row.block)
        block = row.block if whole else row.small_block
        inside = M % block == 0
        kept, streamed = projections * width + out_width, width + out_width
    else:
        # Padded as little, small blocks took 1.05 to 1.35 times the time of large ones.
        more_padding = -N % row.block - -N % row.small_block
        large = N % row.block == 0 or (batch == 1 and row.block < N and PADDED_ONE_IN * more_padding <= N)
        block = row.block if large else row.small_block
        whole_tiles, half_tiles = batch * -(-M // (2 * CONSUMER_ROWS)), batch * -(-M // CONSUMER_ROWS)
        if half_tiles <= sms or (batch > 1 and M % (2 * CONSUMER_ROWS) and whole_tiles < sms):
            consumers = 1  # tiles of half the height, so that twice as many SMs have work, at once
        inside = M % (consumers * CONSUMER_ROWS) == 0 and N % block == 0
        if kernel == "data_gradient" and not wide:
            row_stages = 2
        in_place = kernel == "forward" and width > WIDEST_X_IN_REGISTERS
        kept, streamed = width if in_place else (width + out_width) * row_stages, projections * width + out_width
    if batch > 1 and not inside:
        return None
    # Of each 64 rows or hidden units, so many columns stay on chip.
    stages = stages_that_fit(streamed, block, consumers * kept // CONSUMER_ROWS, MOST_STAGES)
    return Sm90Config(block, consumers, stages, sms, row_stages, row.passes)


def stored_config(
    gated: bool, K: int, N: int, O: int, sms: int, triton_release: tuple[int, ...]
) -> StoredConfig | None:
    """How a backward pass stores what is hidden on Hopper, or None where it was not faster than recomputing it twice.

    At width 256 the accumulators of all weight gradients take two or three passes, each of which recomputes.
    Microseconds of the first kernel and of the second, at the tokens above: 148 and 131; gated 172 and 134.
    """
    if not K == O == 256 or N % 8:
        return None
    if gated and triton_release >= (3, 9):
        return None  # Triton's assembler (ptxas 13.4) makes the first kernel's products wait for one another
    up_stages, down_stages, out_tiles = (6, 3, 1) if gated else (4, 4, 2)
    return StoredConfig(up_stages, down_stages, out_tiles, sms)
