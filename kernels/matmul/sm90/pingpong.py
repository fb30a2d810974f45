"""The ping-pong mainloop: two consumers alternate, each with every other tile.

While one consumer has the tensor cores, the other one runs its epilogue: elementwise arithmetic and stores cost no
tensor core time as long as they take less than a mainloop. The mainloops alternate: each consumer waits on its own
mbarrier of ``Ring.order``, and the other one arrives on it. Otherwise a consumer could fall two fillings of a stage
behind, where the phase of the stage's mbarrier is the same again.
"""

from collections.abc import Sequence
from typing import Any

from ...hopper import Matrix, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from ...launching import Launch, ceil_div
from ...tuning import EpiloguePipeline
from .elements import packed, plus_packed, zeros
from .ring import HALF, TILE, column_halves, make_ring, wait_full
from .schedules import tile_at, tile_count


def columns_at_once(right_transposed: bool, paired: bool = False) -> int:
    """Columns per copy of the right operand; ``paired``: half of a tile's columns belong to another operand."""
    return HALF.value if right_transposed or paired else TILE.value


def dense_launch(
    kernel: Any,
    terms: Sequence[tuple[Matrix, Matrix]],
    out: Matrix,
    pipeline: EpiloguePipeline,
    constants: tuple[object, ...] = (),
    most_terms: int = 1,
    free: tuple[object, ...] = (),
) -> Launch:
    """The launch of a persistent kernel for ``out`` ``[M, N]`` = ``Σ left @ right``, of terms with equal layouts.

    Its tensors are left ``[M, K]`` and right ``[K, N]`` of ``most_terms`` terms, None for absent ones, and the result;
    its numbers K, N and the columns of tiles; its free numbers the rows of tiles, M and ``free``; its constants whether
    right operands are transposed, the pipeline's step, stages, slots and group, and ``constants``.
    """
    left, right = terms[0]
    tile_rows, tile_columns = ceil_div(out.rows, TILE.value), ceil_div(out.columns, TILE.value)
    columns = columns_at_once(right.transposed)
    factors = [
        geometry
        for a, b in terms
        for step in (pipeline.step * pipeline.bits // (8 * a.tensor.element_size()),)
        for geometry in (a.geometry(HALF.value, step), b.geometry(step, columns))
    ]  # fmt: skip
    return Launch(
        kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (left.columns, out.columns, tile_columns),
        (tile_rows, out.rows, *free),
        (right.transposed, pipeline.step, pipeline.stages, pipeline.slots, pipeline.group, *constants),
        geometries=(*factors, *[None] * (2 * most_terms - len(factors)), out.geometry(HALF.value, HALF.value)),
    )


@gluon.jit
def pingpong_ring(left_desc, right_desc, RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """A ring whose stages serve one consumer each, with an order barrier for each consumer."""
    return make_ring(left_desc, right_desc, TILE, False, RIGHT_TRANSPOSED, STEP, STAGES, 1, 2)


@gluon.jit
def mma_tiles(
    consumer: gl.constexpr, ring, schedule, steps, prologue: gl.constexpr, epilogue: gl.constexpr, resources, state
):
    """One consumer: its tiles, whose products take ``steps`` steps of the ring each.

    ``prologue(tile, resources)`` returns the initial accumulators of both halves of a tile's rows, and anything else to
    be loaded during the mainloop, or 0. ``epilogue(consumer, tile, top, bottom, loaded, resources, state)`` takes both
    accumulators and returns the state for the next tile.
    """
    count = 0
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_count(schedule), 2 * gl.num_programs(0)):
        tile = tile_at(schedule, index)
        top, bottom, loaded = prologue(tile, resources)
        top, bottom = multiply(consumer, top, bottom, ring, count, steps)
        count += 1
        state = epilogue(consumer, tile, top, bottom, loaded, resources, state)
    return state


@gluon.jit
def mma_parts(
    consumer: gl.constexpr, ring, schedule, steps, parts, epilogue: gl.constexpr, resources, state
):  # fmt: skip
    """One consumer whose products of 8-bit operands are summed in ``parts`` of ``steps`` steps each, from zero.

    Between two parts a sum waits as bfloat16, two numbers to a register: there are no more. Consumers alternate after
    every part. ``epilogue(consumer, tile, quarters, resources, state)`` takes the four quarters of a tile, the upper
    ones first, and returns the state. Stages are those that :func:`load_parts` fills: the parts of a tile without a
    partner, the last one of some programs, follow one another. A low-rank product begins the first part.
    """
    programs = gl.num_programs(0)
    count = tile_count(schedule)
    turn = 0
    position = 0
    for first in range(gl.program_id(0), count, 2 * programs):
        index = first + consumer * programs
        if index < count:
            tile = tile_at(schedule, index)
            partners = gl.where(first + programs < count, 2, 1)
            upper_left, upper_right = column_halves(zeros(HALF, TILE, 8))
            lower_left, lower_right = upper_left, upper_right
            for part in range(parts):
                if part * (2 - partners) == 0:
                    mbarrier.wait(ring.order.index(consumer), (turn & 1) ^ (1 - consumer))
                    turn += 1
                upper, lower = packed(upper_left, upper_right), packed(lower_left, lower_right)
                acc = zeros(HALF, TILE, 8)
                own = position + (part * partners + consumer) * steps
                top, bottom = acc, acc
                if ring.low_rank is not None:
                    # Only the first part has these steps.
                    more = gl.where(part == 0, ring.low_rank_steps, 0)
                    own += gl.where(part == 0, consumer, partners) * ring.low_rank_steps
                    top, bottom = _add_low_rank(top, bottom, ring.low_rank, own, more)
                    own += more
                top, bottom = _multiply_from(consumer, top, bottom, ring, own, steps)
                upper_left, upper_right = plus_packed(top, upper)
                lower_left, lower_right = plus_packed(bottom, lower)
            state = epilogue(consumer, tile, (upper_left, upper_right, lower_left, lower_right), resources, state)
        position += 2 * (parts * steps + ring.low_rank_steps)
    return state


@gluon.jit
def zero_halves(tile, resources):
    """A prologue: zero accumulators."""
    acc = zeros(HALF, TILE)
    return acc, acc, 0


@gluon.jit
def store_tiles(
    consumer: gl.constexpr, prologue: gl.constexpr, epilogue: gl.constexpr, ring, schedule, steps, resources
):  # fmt: skip
    """A consumer whose epilogue stores its results through TMA; the state is the number of stores so far."""
    stored = 0
    mma_tiles(consumer, ring, schedule, steps, prologue, epilogue, resources, stored)
    tma.store_wait(0)


@gluon.jit
def multiply(consumer: gl.constexpr, top, bottom, ring, count, steps):
    """Add the product of this consumer's ``count``-th tile to the accumulators of its upper and lower rows."""
    position = (2 * count + consumer) * steps
    mbarrier.wait(ring.order.index(consumer), (count & 1) ^ (1 - consumer))
    if ring.low_rank is not None:
        top, bottom = _add_low_rank(top, bottom, ring.low_rank, position, ring.low_rank_steps)
        position += ring.low_rank_steps
        steps -= ring.low_rank_steps
    return _multiply_from(consumer, top, bottom, ring, position, steps)


@gluon.jit
def _add_low_rank(top, bottom, ring, position, steps):
    """Add the steps of a product of 16-bit operands to accumulators of 8-bit ones, in the same registers."""
    layout: gl.constexpr = top.type.layout
    other: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    top = gl.convert_layout(top, other, assert_trivial=True)
    bottom = gl.convert_layout(bottom, other, assert_trivial=True)
    for _ in range(steps):
        stage = wait_full(ring, position)
        # Without columns that are padding in any case.
        upper = ring.left.index(stage * 2).slice(0, ring.COLUMNS, dim=1)
        lower = ring.left.index(stage * 2 + 1).slice(0, ring.COLUMNS, dim=1)
        right = ring.right.index(stage).slice(0, ring.COLUMNS, dim=1).permute((1, 0))
        top = warpgroup_mma(upper, right, top, is_async=True)
        bottom = warpgroup_mma(lower, right, bottom, is_async=True)
        top, bottom = warpgroup_mma_wait(0, [top, bottom])
        mbarrier.arrive(ring.empty.index(stage))
        position += 1
    top = gl.convert_layout(top, layout, assert_trivial=True)
    return top, gl.convert_layout(bottom, layout, assert_trivial=True)


@gluon.jit
def _multiply_from(consumer: gl.constexpr, top, bottom, ring, position, steps):
    """The steps of a product whose first one is the ring's ``position``-th; then it is the other consumer's turn."""
    for step in range(steps):
        stage = wait_full(ring, position)
        upper, lower, right = ring.left.index(stage * 2), ring.left.index(stage * 2 + 1), ring.right.index(stage)
        if ring.RIGHT_TRANSPOSED:
            right = right.permute((1, 0))
        top = warpgroup_mma(upper, right, top, is_async=True)
        bottom = warpgroup_mma(lower, right, bottom, is_async=True)
        top, bottom = warpgroup_mma_wait(2, [top, bottom])
        if step > 0:
            mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
        position += 1
    # From here on the other consumer may issue its wgmmas behind these.
    mbarrier.arrive(ring.order.index(1 - consumer))
    top, bottom = warpgroup_mma_wait(0, [top, bottom])
    mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
    return top, bottom
