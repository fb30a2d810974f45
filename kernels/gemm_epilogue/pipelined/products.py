"""What the kernels share: copies of the operands, and the product of one tile by one of two consumers in turn.

A program has two consumers. Each computes tiles of ``TILE × TILE`` of its own, every other one: while one has the
matrix units, the other is busy with its epilogue, so that arithmetic of single elements and traffic of the results
cost no time of the matrix units as long as they take less than a product. The consumers take turns at the ring of
stages: whose turn it is may read the stages that arrive. Without that, a barrier's parity would not tell a filling from
the one two before it.
"""

from ...dropout import LANES as DRAWN_LANES
from ...dropout import above, swapped, words
from ...hopper import (
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...pipeline import init_barriers, stage_of
from ...tiles import grouped_tile
from ...tuning import CONSUMER_ROWS

# Rows and columns of a consumer's tile, in halves: the rows of one matrix instruction, and the columns of an epilogue.
TILE = gl.constexpr(2 * CONSUMER_ROWS)
HALF = gl.constexpr(CONSUMER_ROWS)
LANES = gl.constexpr(DRAWN_LANES)


def columns_at_once(right_transposed: bool, paired: bool = False) -> int:
    """Columns of the result for which one copy brings the right operand; ``paired``: half of a tile's are another's."""
    return HALF.value if right_transposed or paired else TILE.value


@gluon.jit
def make_ring(left_desc, right_desc, RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """The stages of the left and the right operand, as they lie in memory, and the barriers: full, empty and turns.

    Whose turn it is says a barrier of each consumer, at which the other one arrives.
    """
    DTYPE: gl.constexpr = right_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = TILE if RIGHT_TRANSPOSED else STEP
    COLUMNS: gl.constexpr = STEP if RIGHT_TRANSPOSED else TILE
    left = gl.allocate_shared_memory(DTYPE, [STAGES * 2, HALF, STEP], left_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, COLUMNS], right_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    init_barriers(full, empty, STAGES, 1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    return left, right, full, empty, turns


@gluon.jit
def rows_in_use(tile_rows, experts):
    """How many rows of tiles there are: of rows sorted by expert, only the device knows."""
    _, starts_ptr, COUNT, _ = experts
    if starts_ptr is None:
        return tile_rows
    else:
        return gl.load(starts_ptr + COUNT) // TILE


@gluon.jit
def tile_of(index, tile_rows, tile_columns, experts, group):
    """(tile row, tile column, expert) of the ``index``-th tile.

    ``experts`` are, where rows are sorted by them, the expert of each row of tiles, where the rows of each begin, which
    is the start of a tile, how many they are, and how many rows of the weights each has. Tiles of one expert follow
    one another, in groups of about ``group`` rows of tiles: they share the expert's weights in the cache.
    """
    tile_expert_ptr, starts_ptr, _, _ = experts
    if tile_expert_ptr is None:
        tile_row, tile_column = grouped_tile(index, tile_rows, tile_columns, group)
        return tile_row, tile_column, 0
    else:
        expert = gl.load(tile_expert_ptr + index // tile_columns)
        begin = gl.load(starts_ptr + expert) // TILE
        count = gl.load(starts_ptr + expert + 1) // TILE - begin
        # Groups are alike: a last one of few rows would read all weights of the expert for them.
        rows = gl.cdiv(count, gl.cdiv(count, group))
        inside = index - begin * tile_columns
        first = inside // (rows * tile_columns) * rows
        height = gl.minimum(rows, count - first)
        inside -= first * tile_columns
        return begin + first + inside % height, inside // height, expert


@gluon.jit
def copy_operands(
    left_desc, right_desc, other_desc, low_rank, left_ring, right_ring, full, empty, tile_rows, tile_columns, inner,
    experts, group,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: fills the ring with ``STEP`` of the inner axis of both operands at a time.

    A row of ``right`` in memory is a column of the result where ``RIGHT_TRANSPOSED``: y = x Wᵀ of a linear layer. With
    ``other``, half of the columns are products with it. ``low_rank`` is a second product that is added to the first
    one: its three descriptors, its inner axis, and where on that the other one begins.
    """
    SPAN: gl.constexpr = TILE if other_desc is None else HALF
    position = 0
    for index in range(gl.program_id(0), tile_rows * tile_columns, gl.num_programs(0)):
        tile_row, tile_column, expert = tile_of(index, tile_rows, tile_columns, experts, group)
        position = copy_tile(
            left_desc, right_desc, other_desc, left_ring, right_ring, full, empty, tile_row * TILE, tile_column * SPAN,
            inner, position, expert * experts[3], RIGHT_TRANSPOSED, STEP, STAGES,
        )  # fmt: skip
        if low_rank[0] is not None:
            position = copy_tile(
                low_rank[0], low_rank[1], low_rank[2], left_ring, right_ring, full, empty, tile_row * TILE,
                tile_column * SPAN, low_rank[3], position, 0, RIGHT_TRANSPOSED, STEP, STAGES, low_rank[4],
            )  # fmt: skip


@gluon.jit
def copy_tile(
    left_desc, right_desc, other_desc, left_ring, right_ring, full, empty, row, column, inner, position, first,
    RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, other_first=0,
):  # fmt: skip
    """What the product of one tile reads, into the ring from ``position`` on; returns the position behind it.

    The right operand is the part of its matrix from row ``first`` on. The inner axis of ``other`` begins at
    ``other_first``: TMA fills what lies before it with zeros.
    """
    LAYOUT: gl.constexpr = right_desc.layout
    DTYPE: gl.constexpr = right_desc.dtype
    RIGHT_COPIES: gl.constexpr = 2 if RIGHT_TRANSPOSED or other_desc is not None else 1
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + RIGHT_COPIES * right_desc.block_type.nbytes
    for k in range(0, inner, STEP):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        copy_in(left_desc, [row, k], full.index(stage), left_ring.index(stage * 2))
        copy_in(left_desc, [row + HALF, k], full.index(stage), left_ring.index(stage * 2 + 1))
        right = right_ring.index(stage)
        if RIGHT_TRANSPOSED:
            halves = reinterpret(right, DTYPE, [2, HALF, STEP], LAYOUT)
            copy_in(right_desc, [first + column, k], full.index(stage), halves.index(0))
            if other_desc is None:
                copy_in(right_desc, [first + column + HALF, k], full.index(stage), halves.index(1))
            else:
                copy_in(other_desc, [first + column, k - other_first], full.index(stage), halves.index(1))
        elif other_desc is None:
            copy_in(right_desc, [first + k, column], full.index(stage), right)
        else:
            halves = reinterpret(right, DTYPE, [2, STEP, HALF], LAYOUT)
            copy_in(right_desc, [first + k, column], full.index(stage), halves.index(0))
            copy_in(other_desc, [first + k - other_first, column], full.index(stage), halves.index(1))
        position += 1
    return position


@gluon.jit
def multiply(
    consumer: gl.constexpr, top, bottom, left_ring, right_ring, full, empty, turns, turn, steps,
    RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds the product of this consumer's ``turn``-th tile to its upper and lower half of the rows."""
    position = (2 * turn + consumer) * steps
    mbarrier.wait(turns.index(consumer), (turn & 1) ^ (1 - consumer))
    for step in range(steps):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(full.index(stage), phase)
        upper, lower, right = left_ring.index(stage * 2), left_ring.index(stage * 2 + 1), right_ring.index(stage)
        if RIGHT_TRANSPOSED:
            right = right.permute((1, 0))
        top = warpgroup_mma(upper, right, top, is_async=True)
        bottom = warpgroup_mma(lower, right, bottom, is_async=True)
        top, bottom = warpgroup_mma_wait(2, [top, bottom])
        if step > 0:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        position += 1
    # The other one may line up its products behind the last of these.
    mbarrier.arrive(turns.index(1 - consumer))
    top, bottom = warpgroup_mma_wait(0, [top, bottom])
    mbarrier.arrive(empty.index((position - 1) % STAGES))
    return top, bottom


@gluon.jit
def column_halves(acc, layout: gl.constexpr):
    """The left and the right half of the columns, both in ``layout``: they lie in the same registers as before."""
    COLUMNS: gl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape([acc.shape[0], 2, COLUMNS]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def send(consumer: gl.constexpr, desc, row, column, values, places, sent, PLACES: gl.constexpr):
    """Sends a tile on its way out, through one of the consumer's ``PLACES``; returns how many were sent."""
    # All but the copies that were sent last have left their places.
    tma.store_wait(PLACES - 1)
    place = places.index(consumer * PLACES + sent % PLACES)
    place.store(values.to(place.dtype))
    fence_async_shared()
    copy_out(desc, [row, column], place)
    return sent + 1


@gluon.jit
def draw(dropout, row, column, layout: gl.constexpr):
    """Which elements of an epilogue's tile are kept: boolean, in the registers where ``layout`` has the elements."""
    # A thread has two columns of eight in this one, and in that of the tile the same two of every eight.
    lanes: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    rows = row + dropout[3] + gl.arange(0, HALF, gl.SliceLayout(1, lanes))
    draws = (column + dropout[4]) // HALF * LANES + gl.arange(0, LANES, gl.SliceLayout(0, lanes))
    first, second, third, fourth = words(
        gl.load(dropout[0]), gl.expand_dims(rows, 1).to(gl.int64), gl.expand_dims(draws, 0)
    )
    left = gl.join(gl.join(swapped(first), first), gl.join(swapped(second), second))
    right = gl.join(gl.join(swapped(third), third), gl.join(swapped(fourth), fourth))
    # [rows, lanes, half, word % 2, word // 2] -> [rows, columns].
    drawn = gl.join(left, right).permute((0, 4, 3, 2, 1)).reshape([HALF, HALF])
    return above(gl.convert_layout(drawn, layout, assert_trivial=True), dropout[1])


@gluon.jit
def dropped(values, kept, scale):
    """The values of a tile times the scale where they are ``kept``, else times 0."""
    # Among the factors: to choose among 16-bit results, the compiler takes them out of their pairs and pairs them anew.
    return values * gl.where(kept, scale, 0.0)
