"""The load warp: TMA copies of the operands of one tile after another into the stages of the ring."""

from ...hopper import Resource, copy_in, gl, gluon, reinterpret, resources
from .ring import HALF, acquire
from .schedules import tile_at, tile_count


@resources("left right other inner first")
class Term(Resource):
    """One of the products that a tile sums: descriptors of its operands, and the length of its inner axis.

    If ``other`` is given, half of the tile's columns are products with it. Its inner axis begins at ``first``: TMA
    loads zeros before that.
    """


@gluon.jit
def load_tiles(ring, schedule, first_term, second_term=None):
    """The load warp: load the term, or both terms, of one tile after another.

    If the second one is the ring's low-rank product, it comes first.
    """
    position = 0
    for index in range(gl.program_id(0), tile_count(schedule), gl.num_programs(0)):
        row, column, expert = tile_at(schedule, index)
        first = expert * schedule.weight_rows
        if ring.low_rank is not None:
            position = load_term(ring.low_rank, second_term, row, column, first, position)
        position = load_term(ring, first_term, row, column, first, position)
        if second_term is not None and ring.low_rank is None:
            if second_term.left is not None:
                position = load_term(ring, second_term, row, column, first, position)


@gluon.jit
def load_parts(ring, schedule, term, low_rank, steps, parts):
    """The load warp for ``pingpong.mma_parts``: a part of one consumer's tile, then the same part of the other one's.

    A low-rank product comes before the first part. Beyond the end of the inner axis, where the last steps of the last
    part may lie, TMA loads zeros.
    """
    programs = gl.num_programs(0)
    position = 0
    for first in range(gl.program_id(0), tile_count(schedule), 2 * programs):
        for part in range(parts):
            for consumer in range(2):
                index = first + consumer * programs
                if index < tile_count(schedule):
                    row, column, expert = tile_at(schedule, index)
                    own = expert * schedule.weight_rows
                    if ring.low_rank is not None:
                        if part == 0:
                            position = load_term(ring.low_rank, low_rank, row, column, 0, position)
                    begin = part * steps * ring.STEP
                    position = load_inner(ring, term, row, column, own, begin, begin + steps * ring.STEP, position)


@gluon.jit
def load_term(ring, term, row, column, first, position):
    """Load a term's operands for one tile into the ring from ``position`` on; return the next position."""
    return load_inner(ring, term, row, column, first, 0, term.inner, position)


@gluon.jit
def load_inner(ring, term, row, column, first, begin, end, position):
    """The same from ``begin`` to ``end`` of the inner axis.

    If ``RIGHT_TRANSPOSED``, a row of the right operand in memory is a column of the result, as in y = x Wᵀ. The right
    operand is the part of its matrix from row ``first`` on.
    """
    ROWS: gl.constexpr = term.left.block_type.shape[0]
    # The right operand of a tile takes one copy, or two with half of its columns each.
    COPIES: gl.constexpr = ring.right.shape[1] * ring.right.shape[2] // term.right.block_type.numel
    BYTES: gl.constexpr = 2 * term.left.block_type.nbytes + COPIES * term.right.block_type.nbytes
    for k in range(begin, end, ring.STEP):
        stage, full = acquire(ring, position, BYTES)
        copy_in(term.left, [row, k], full, ring.left.index(stage * 2))
        copy_in(term.left, [row + ROWS, k], full, ring.left.index(stage * 2 + 1))
        right = ring.right.index(stage)
        if COPIES == 1:
            if ring.RIGHT_TRANSPOSED:
                copy_in(term.right, [first + column, k], full, right)
            else:
                copy_in(term.right, [first + k, column], full, right)
        else:
            halves = reinterpret(right, right.dtype, [2] + term.right.block_type.shape, term.right.layout)
            if ring.RIGHT_TRANSPOSED:
                copy_in(term.right, [first + column, k], full, halves.index(0))
                if term.other is None:
                    copy_in(term.right, [first + column + HALF, k], full, halves.index(1))
                else:
                    copy_in(term.other, [first + column, k - term.first], full, halves.index(1))
            else:
                copy_in(term.right, [first + k, column], full, halves.index(0))
                copy_in(term.other, [first + k - term.first, column], full, halves.index(1))
        position += 1
    return position


@gluon.jit
def load_rows(ring, left_desc, right_desc, unit, column, row, steps, position):
    """The same for weight gradients: the inner axis is the rows of both operands, from ``row`` on.

    In 8 bits both operands are transposed in memory, and their rows lie side by side.
    """
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    for step in range(steps):
        stage, full = acquire(ring, position, BYTES)
        first = row + step * ring.STEP
        if ring.LEFT_TRANSPOSED:
            copy_in(left_desc, [first, unit], full, ring.left.index(stage * 2))
            copy_in(left_desc, [first, unit + left_desc.block_type.shape[1]], full, ring.left.index(stage * 2 + 1))
            copy_in(right_desc, [first, column], full, ring.right.index(stage))
        else:
            copy_in(left_desc, [unit, first], full, ring.left.index(stage * 2))
            copy_in(left_desc, [unit + left_desc.block_type.shape[0], first], full, ring.left.index(stage * 2 + 1))
            copy_in(right_desc, [column, first], full, ring.right.index(stage))
        position += 1
    return position


@gluon.jit
def load_block(ring, start, first, full, index):
    """Copy a block into an ``OperandRing``: the rows from ``first`` on of the batch entry that begins at ``start``."""
    APART: gl.constexpr = len(ring.desc.block_type.shape) == 3
    if APART:
        copy_in(ring.desc, [start, 0, first], full, ring.tiles.index(index))
    elif ring.TRANSPOSED:
        copy_in(ring.desc, [start, first], full, ring.tiles.index(index))
    else:
        copy_in(ring.desc, [start + first, 0], full, ring.tiles.index(index))


@gluon.jit
def rows_first(ring, index):
    """A block of an ``OperandRing`` as ``[rows, columns]``, whatever its layout in memory."""
    tile = ring.tiles.index(index)
    APART: gl.constexpr = len(tile.shape) == 3
    if APART:
        tile = tile.reshape([tile.shape[1], tile.shape[2]])
    if ring.TRANSPOSED:
        tile = tile.permute((1, 0))
    return tile
