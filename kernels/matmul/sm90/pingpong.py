"""The ping-pong mainloop: two consumers compute tiles of their own, every other one.

While one consumer has the matrix units, the other one is busy with its epilogue, so that arithmetic of single elements
and traffic of the results cost no time of the matrix units as long as they take less than a product. The consumers
alternate at the ring: each waits on its own barrier of ``Ring.order``, and the other one arrives on it. Without that,
the phase of a stage's barrier would not tell a filling from the one two before it.
"""

from collections.abc import Sequence
from typing import Any

from ...hopper import Matrix, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from ...launching import Launch, ceil_div
from ...tuning import EpiloguePipeline
from .elements import zeros
from .ring import HALF, TILE, make_ring, wait_full
from .schedules import tile_at, tile_count


def columns_at_once(right_transposed: bool, paired: bool = False) -> int:
    """Columns of the result for which one copy brings the right operand; ``paired``: half of a tile's are another's."""
    return HALF.value if right_transposed or paired else TILE.value


def dense_launch(
    kernel: Any,
    terms: Sequence[tuple[Matrix, Matrix]],
    out: Matrix,
    pipeline: EpiloguePipeline,
    constants: tuple[object, ...] = (),
    most_terms: int = 1,
) -> Launch:
    """The launch of a persistent kernel that fills ``out`` ``[M, N]`` from ``Σ left @ right``, terms that lie alike.

    Its tensors are left ``[M, K]`` and right ``[K, N]`` of ``most_terms`` terms, None where there are fewer, and the
    result; its numbers K, N, the columns of tiles, and free to change, the rows of tiles and M; its constants whether
    right operands lie transposed, the pipeline's step, stages, places and group, and ``constants``.
    """
    left, right = terms[0]
    tile_rows, tile_columns = ceil_div(out.rows, TILE.value), ceil_div(out.columns, TILE.value)
    columns = columns_at_once(right.transposed)
    factors = [
        geometry
        for a, b in terms
        for geometry in (a.geometry(HALF.value, pipeline.step), b.geometry(pipeline.step, columns))
    ]  # fmt: skip
    return Launch(
        kernel,
        min(tile_rows * tile_columns, pipeline.programs),
        (left.columns, out.columns, tile_columns),
        (tile_rows, out.rows),
        (right.transposed, pipeline.step, pipeline.stages, pipeline.places, pipeline.group, *constants),
        geometries=(*factors, *[None] * (2 * most_terms - len(factors)), out.geometry(HALF.value, HALF.value)),
    )


@gluon.jit
def pingpong_ring(left_desc, right_desc, RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """A ring whose stages serve one consumer each, and the barrier of each consumer's turn."""
    return make_ring(left_desc, right_desc, TILE, False, RIGHT_TRANSPOSED, STEP, STAGES, 1, 2)


@gluon.jit
def mma_tiles(
    consumer: gl.constexpr, ring, schedule, steps, prologue: gl.constexpr, epilogue: gl.constexpr, resources, state
):
    """A consumer: the products of its tiles, of so many ``steps`` of the ring each.

    ``prologue(tile, resources)`` gives what both halves of a tile's rows start with, and whatever else is to be loaded
    while the product is computed, or 0. ``epilogue(consumer, tile, top, bottom, loaded, resources, state)`` takes the
    sums of both halves, and returns the state that the next tile begins with.
    """
    turn = 0
    first = gl.program_id(0) + consumer * gl.num_programs(0)
    for index in range(first, tile_count(schedule), 2 * gl.num_programs(0)):
        tile = tile_at(schedule, index)
        top, bottom, loaded = prologue(tile, resources)
        top, bottom = multiply(consumer, top, bottom, ring, turn, steps)
        turn += 1
        state = epilogue(consumer, tile, top, bottom, loaded, resources, state)
    return state


@gluon.jit
def zero_halves(tile, resources):
    """A prologue: products alone."""
    acc = zeros(HALF, TILE)
    return acc, acc, 0


@gluon.jit
def store_tiles(
    consumer: gl.constexpr, prologue: gl.constexpr, epilogue: gl.constexpr, ring, schedule, steps, resources
):  # fmt: skip
    """A consumer whose epilogue stores what it makes of its tiles through TMA; the state is how many such stores."""
    stored = 0
    mma_tiles(consumer, ring, schedule, steps, prologue, epilogue, resources, stored)
    tma.store_wait(0)


@gluon.jit
def multiply(consumer: gl.constexpr, top, bottom, ring, turn, steps):
    """Adds the product of this consumer's ``turn``-th tile to its upper and lower half of the rows."""
    position = (2 * turn + consumer) * steps
    mbarrier.wait(ring.order.index(consumer), (turn & 1) ^ (1 - consumer))
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
    # The other consumer may line up its products behind the last of these.
    mbarrier.arrive(ring.order.index(1 - consumer))
    top, bottom = warpgroup_mma_wait(0, [top, bottom])
    mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
    return top, bottom
