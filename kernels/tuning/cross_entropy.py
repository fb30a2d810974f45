"""Cross-entropy: columns per step of a row of logits, and the tiles of logits that stay on chip."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from .grouped_gemm import GroupedTiles
from .limits import CONSUMER_ROWS, padded_width

# Columns per step. More would keep more loads in flight, but every lane has registers for its maximum and its sums: on
# an H200 2,048 columns took 0.7 to 0.97 of the time of 4,096 to 16,384.
WIDEST_ROW_BLOCK = 2048
_NARROWEST = 128
# Per thread and step: one load of 16 bytes in a 16-bit dtype.
_ELEMENTS = 8


@dataclass(frozen=True)
class RowTiles:
    """A program has one row, in steps of ``block`` columns."""

    block: int
    num_warps: int


def row_tiles(columns: int) -> RowTiles:
    """The tiles for rows of so many columns, in every dtype: sums are always float32."""
    block = min(WIDEST_ROW_BLOCK, max(_NARROWEST, padded_width(columns)))
    return RowTiles(block, max(1, block // (32 * _ELEMENTS)))


@dataclass(frozen=True)
class LogitPipeline:
    """The sm90 kernel: two consumers of 64 rows each share a tile of 128 rows and ``columns`` columns.

    The ring has ``stages`` of ``step`` along the inner axis. The second consumer is ``lead`` stages behind the first,
    so that one has the tensor cores while the other reduces its tile. Tiles are swizzled in groups of ``group`` tile
    rows, over ``programs`` programs. Each consumer has ``slots`` staging buffers for 64 columns of a gradient.
    """

    columns: int = 256
    step: int = 64
    stages: int = 4
    lead: int = 2
    group: int = 12
    programs: int = 132
    slots: int = 0


@dataclass(frozen=True)
class LogitTiles(GroupedTiles):
    """The generic kernels' tiles; ``sm90`` is the sm90 kernel's configuration, if it may compute the call."""

    sm90: LogitPipeline | None = None


class Shares(NamedTuple):
    """How tiles of logits are distributed over programs: see ``cross_entropy.tile.ranges_of``.

    ``bands`` of ``rows`` rows have ``tile_columns`` tiles each; ``programs`` programs compute ``group`` bands at once.
    """

    rows: int
    bands: int
    tile_columns: int
    programs: int
    group: int

    @property
    def partials(self) -> int:
        """The number of partial results: one for each row and range of its columns."""
        whole, rest = self.bands // self.group * self.group, self.bands % self.group
        ranges = whole * min(self.programs // min(self.group, self.bands), self.tile_columns)
        ranges += rest * min(self.programs // rest, self.tile_columns) if rest else 0
        return self.rows * ranges


# By (architecture, bits of an element); architectures without a row take that of "other".
LOGIT_TILES: dict[tuple[str, int], LogitTiles] = {
    ("sm_90", 16): LogitTiles(128, 128, 64, 8, 3),
    ("other", 16): LogitTiles(64, 64, 32, 4, 2),
    ("other", 32): LogitTiles(64, 64, 32, 4, 2),
}


def logit_tiles(architecture: str, bits: int, sms: int, sm90: bool) -> LogitTiles:
    """The tiles of logits for operands of ``bits`` bits; ``sm90``: the sm90 kernel may run."""
    return _tiles(architecture, bits, LogitPipeline(programs=sms) if sm90 else None)


def gradient_tiles(architecture: str, bits: int, sms: int, sm90: bool) -> LogitTiles:
    """The tiles of the gradient of logits, likewise."""
    # The group is a power of two: its tiles are neighbours.
    return _tiles(architecture, bits, LogitPipeline(programs=sms, group=16, slots=2) if sm90 else None)


def _tiles(architecture: str, bits: int, sm90: LogitPipeline | None) -> LogitTiles:
    return replace(LOGIT_TILES.get((architecture, bits)) or LOGIT_TILES["other", bits], sm90=sm90)


def generic_shares(tiles: LogitTiles, rows: int, columns: int, ranges: int) -> Shares:
    """The shares of the generic kernel: each program has one of ``ranges`` ranges of one band of rows."""
    tile_columns = -(-columns // tiles.block_n)
    return Shares(tiles.block_m, -(-rows // tiles.block_m), tile_columns, min(ranges, tile_columns), 1)


def sm90_shares(pipeline: LogitPipeline, rows: int, columns: int) -> Shares:
    """The shares of the sm90 kernel: each program has one range of every group of bands."""
    band = 2 * CONSUMER_ROWS
    bands, tile_columns = -(-rows // band), -(-columns // pipeline.columns)
    # A band of rows has at least one program.
    group = min(pipeline.group, pipeline.programs)
    return Shares(band, bands, tile_columns, min(pipeline.programs, bands * tile_columns), group)
