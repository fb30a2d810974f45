"""The cooperative mainloop: both consumers compute one tile together, each of them half of its rows.

For a tile of 128 × 256 an SM loads 48 KiB for each step of 64 of the inner axis, where two tiles of 128 × 128 take
64 KiB, and the matrix unit reads a sixth less of shared memory. In return nothing is multiplied while both consumers
are busy with their epilogues. Where a ``LEAD`` is given, the second consumer stays so many steps behind the first one,
so that one of them has the matrix units meanwhile.
"""

from ...hopper import gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .ring import column_halves, make_ring, tma_store, wait_full
from .schedules import tile_at, tile_count


@gluon.jit
def cooperative_ring(
    left_desc, right_desc, COLUMNS: gl.constexpr, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr = 2, LEAD: gl.constexpr = 0,
):  # fmt: skip
    """A ring each stage of which both consumers read, with a barrier for the lead of the first one."""
    return make_ring(
        left_desc, right_desc, COLUMNS, LEFT_TRANSPOSED, RIGHT_TRANSPOSED, STEP, STAGES, READERS, 1 if LEAD else 0
    )


@gluon.jit
def mma_tiles(
    consumer: gl.constexpr, ring, schedule, steps, prologue: gl.constexpr, epilogue: gl.constexpr, resources, state,
    LEAD: gl.constexpr = 0,
):  # fmt: skip
    """A consumer: its rows of each tile, whose product takes so many ``steps`` of the ring.

    ``prologue(consumer, tile, resources)`` gives what the consumer's rows start with, and whatever else is to be loaded
    while the product is computed; ``epilogue(consumer, tile, acc, loaded, resources, state)`` takes their sums, and
    returns the state that the next tile begins with.
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
    """A consumer whose epilogue stores what it makes of its rows through TMA; the state is how many such stores."""
    stored = 0
    mma_tiles(consumer, ring, schedule, steps, prologue, epilogue, resources, stored, LEAD)
    tma.store_wait(0)


@gluon.jit
def multiply(
    consumer: gl.constexpr, acc, ring, position, steps, count=0, LEAD: gl.constexpr = 0,
    MAY_BE_EMPTY: gl.constexpr = False,
):  # fmt: skip
    """Adds to this consumer's rows of its ``count``-th tile the product that lies in the ring from ``position`` on."""
    # A tile of fewer steps than there are stages would let the first consumer pass the barrier twice.
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
            # No branch: behind one the assembler would have the products wait for one another.
            mbarrier.arrive(ring.order.index(0), pred=leads & (step == LEAD - 1))
        position += 1
    acc = warpgroup_mma_wait(0, [acc])
    if not MAY_BE_EMPTY or steps > 0:
        mbarrier.arrive(ring.empty.index((position - 1) % ring.STAGES))
    return acc


@gluon.jit
def store_rows(consumer: gl.constexpr, desc, row, column, acc, staging, stored):
    """Stores a consumer's rows of a tile, 64 columns at a time; returns how many such parts it has stored so far."""
    PARTS: gl.constexpr = desc.block_type.shape[1]
    if acc.shape[1] == PARTS:
        stored = tma_store(consumer, desc, row, column, acc, staging, stored)
    else:
        left, right = column_halves(acc)
        stored = store_rows(consumer, desc, row, column, left, staging, stored)
        stored = store_rows(consumer, desc, row, column + acc.shape[1] // 2, right, staging, stored)
    return stored
