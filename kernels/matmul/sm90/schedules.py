"""Schedules: which tile of a result comes next in a persistent kernel."""

from ...hopper import Resource, gl, gluon, resources
from ...tiles import grouped_tile
from .ring import TILE


@resources("tile_rows tile_columns group tile_expert_ptr starts_ptr weight_rows COLUMNS")
class Schedule(Resource):
    """The tiles of a dense product, or of rows that are sorted by expert.

    A tile has 128 rows and ``COLUMNS`` columns. Tiles are swizzled, ``group`` tile rows at a time, so that tiles that
    are computed at the same time share operands in the L2 cache. For sorted rows, ``tile_expert_ptr`` has the expert of
    each row of tiles, and ``starts_ptr`` the first row of each expert, which begins a tile, and the end of the last
    one; every expert has ``weight_rows`` rows of the weights.
    """


@gluon.jit
def make_schedule(
    tile_rows, tile_columns, group, tile_expert_ptr, starts_ptr, experts, weight_rows, COLUMNS: gl.constexpr
):  # fmt: skip
    """The schedule of dense or of sorted rows; only the device knows the number of tile rows of sorted ones."""
    if starts_ptr is not None:
        tile_rows = gl.load(starts_ptr + experts) // TILE
    return Schedule(
        tile_rows=tile_rows, tile_columns=tile_columns, group=group, tile_expert_ptr=tile_expert_ptr,
        starts_ptr=starts_ptr, weight_rows=weight_rows, COLUMNS=COLUMNS,
    )  # fmt: skip


@gluon.jit
def dense_schedule(tile_rows, tile_columns, group, COLUMNS: gl.constexpr):
    """The tiles of a dense product."""
    return make_schedule(tile_rows, tile_columns, group, None, None, 0, 0, COLUMNS)


@gluon.jit
def tile_count(schedule):
    return schedule.tile_rows * schedule.tile_columns


@gluon.jit
def tile_at(schedule, index):
    """(first row, first column, expert) of the ``index``-th tile. Tiles of one expert follow one another."""
    if schedule.tile_expert_ptr is None:
        tile_row, tile_column = grouped_tile(index, schedule.tile_rows, schedule.tile_columns, schedule.group)
        return tile_row * TILE, tile_column * schedule.COLUMNS, 0
    else:
        expert = gl.load(schedule.tile_expert_ptr + index // schedule.tile_columns)
        begin = gl.load(schedule.starts_ptr + expert) // TILE
        count = gl.load(schedule.starts_ptr + expert + 1) // TILE - begin
        # Groups of equal height: a last group of few rows would read all weights of the expert for these.
        rows = gl.cdiv(count, gl.cdiv(count, schedule.group))
        inside = index - begin * schedule.tile_columns
        first = inside // (rows * schedule.tile_columns) * rows
        height = gl.minimum(rows, count - first)
        inside -= first * schedule.tile_columns
        return (begin + first + inside % height) * TILE, inside // height * schedule.COLUMNS, expert


@resources("tiles entry_tiles ROWS")
class RowSchedule(Resource):
    """``tiles`` bands of ``ROWS`` rows with all columns, ``entry_tiles`` of them per batch entry."""


@gluon.jit
def rows_at(schedule, index):
    """(batch entry, first row in it) of the ``index``-th band."""
    return index // schedule.entry_tiles, index % schedule.entry_tiles * schedule.ROWS
