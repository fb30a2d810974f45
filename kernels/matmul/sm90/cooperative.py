"""The cooperative mainloop: both consumers compute one tile, half of its rows each.

For a tile of 128 × 256 an SM loads 48 KiB per step of 64 along the inner axis, where two tiles of 128 × 128 take
64 KiB, and the tensor cores read a sixth less from shared memory. In return they idle while both consumers run their
epilogues. With a ``LEAD`` the second consumer stays that many steps behind the first, so that their epilogues overlap
less.
"""

from ...hopper import gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import column_halves, make_ring, tma_store, wait_full
from .schedules import tile_at, tile_count


@gluon.jit
def cooperative_ring(
    left_desc, right_desc, COLUMNS: gl.constexpr, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr = 2, LEAD: gl.constexpr = 0,
):  # fmt: skip
    """A ring whose stages both consumers read; a ``LEAD`` takes an order barrier."""
    return make_ring(
        left_desc, right_desc, COLUMNS, LEFT_TRANSPOSED, RIGHT_TRANSPOSED, STEP, STAGES, READERS, 1 if LEAD else 0
    )


@gluon.jit
def mma_tiles(
    consumer: gl.constexpr, ring, schedule, steps, prologue: gl.constexpr, epilogue: gl.constexpr, resources, state,
    LEAD: gl.constexpr = 0,
):  # fmt: skip
    """One consumer: its rows of each tile, whose product takes ``steps`` steps of the ring.

    ``prologue(consumer, tile, resources)`` returns the initial accumulator, and anything else to be loaded during the
    mainloop; ``epilogue(consumer, tile, acc, loaded, resources, state)`` takes the accumulator and returns the state
    for the next tile.
    """
    count = 0
    for index in range(gl.program_id(0), tile_count(schedule), gl.num_programs(0)):
        tile = tile_at(schedule, index)
        acc, loaded = prologue(consumer, tile, resources)
        acc = multiply(consumer, acc, ring, count * steps, steps, count, LEAD)
        count += 1
        state = epilogue(consumer, tile, acc, loaded, resources, state)
    return state


@gluon.jit
def store_tiles(
    consumer: gl.constexpr, prologue: gl.constexpr, epilogue: gl.constexpr, ring, schedule, steps, resources,
    LEAD: gl.constexpr = 0,
):  # fmt: skip
    """A consumer whose epilogue stores its results through TMA; the state is the number of stores so far."""
    stored = 0
    mma_tiles(consumer, ring, schedule, steps, prologue, epilogue, resources, stored, LEAD)
    tma.store_wait(0)


@gluon.jit
def multiply(
    consumer: gl.constexpr, acc, ring, position, steps, count=0, LEAD: gl.constexpr = 0,
    MAY_BE_EMPTY: gl.constexpr = False,
):  # fmt: skip
    """Add the product of the ring's steps from ``position`` on to this consumer's rows of its ``count``-th tile."""
    # With fewer steps than stages the first consumer could run ahead and complete two phases of the barrier.
    leads = steps >= ring.STAGES
    if LEAD > 0 and consumer == 1:
        mbarrier.wait(ring.order.index(0), count & 1, pred=leads)
    for step in range(steps):
        stage = wait_full(ring, position)
        left, right = ring.left.index(stage * 2 + consumer), ring.right.index(stage)
        if ring.LEFT_TRANSPOSED:
            left = left.permute((1, 0))
        if ring.RIGHT_TRANSPOSED:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if step > 0:
            mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
        if LEAD > 0 and consumer == 0:
            # Predicated: after a branch the assembler would serialise the wgmmas.
            mbarrier.arrive(ring.order.index(0), pred=leads & (step == LEAD - 1))
        position += 1
    acc = warpgroup_mma_wait(0, [acc])
    if not MAY_BE_EMPTY or steps > 0:
        mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
    return acc


@gluon.jit
def store_rows(consumer: gl.constexpr, desc, row, column, acc, staging, stored):
    """Store a consumer's rows of a tile, 64 columns at a time; return the number of stores so far."""
    PARTS: gl.constexpr = desc.block_type.shape[1]
    if acc.shape[1] == PARTS:
        stored = tma_store(consumer, desc, row, column, acc, staging, stored)
    else:
        left, right = column_halves(acc)
        stored = store_rows(consumer, desc, row, column, left, staging, stored)
        stored = store_rows(consumer, desc, row, column + acc.shape[1] // 2, right, staging, stored)
    return stored
