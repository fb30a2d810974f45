"""What the mainloops on Hopper share: the ring of stages in shared memory, its barriers, and results on their way out.

The load warp (``roles``) fills the stages of a ring, waiting for a stage's ``empty`` barrier and giving its ``full``
barrier to the copies. Consumers wait for ``full``, multiply, and arrive at ``empty``.
"""

from typing import Any

from ...hopper import copy_out, fence_async_shared, gl, gluon, mbarrier, resources, tma
from ...tuning import CONSUMER_ROWS

# Rows of one matrix instruction; rows and columns of what an epilogue holds of a tile at once.
HALF = gl.constexpr(CONSUMER_ROWS)
TILE = gl.constexpr(2 * CONSUMER_ROWS)


@resources
class Ring:
    """``STAGES`` stages of both operands, ``STEP`` of the inner axis at a time, as they lie in global memory.

    A stage has two halves of the left operand's rows. At the barriers of ``order`` the consumers wait for one another;
    what for is the mainloop's own.
    """

    left: Any
    right: Any
    full: Any
    empty: Any
    order: Any
    LEFT_TRANSPOSED: Any
    RIGHT_TRANSPOSED: Any
    STEP: Any
    STAGES: Any


@resources
class OperandRing:
    """The same for one operand that is a matrix, or a batch of them: a stage is a block of its rows, or several.

    Of a ``TRANSPOSED`` matrix it is a block of columns, as they lie in global memory. The entries of a batch begin
    ``step`` rows apart, or have an axis of their own: see ``hopper.Matrix``.
    """

    desc: Any
    step: Any
    tiles: Any
    full: Any
    empty: Any
    STAGES: Any
    TRANSPOSED: Any


@resources
class Staging:
    """Buffers in shared memory through which a consumer's results leave, ``SLOTS`` for each consumer."""

    buffers: Any
    SLOTS: Any


@gluon.jit
def stage_of(position, STAGES: gl.constexpr):
    """(stage, phase of its full barrier) of the ``position``-th filling of a ring. The empty one is a phase behind."""
    return position % STAGES, (position // STAGES) & 1


@gluon.jit
def acquire(ring, position, BYTES: gl.constexpr):
    """(stage, its full barrier) for the load warp, once all have read it, to be filled with so many bytes."""
    stage, phase = stage_of(position, ring.STAGES)
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(full, BYTES)
    return stage, full


@gluon.jit
def wait_full(ring, position):
    """The stage of the ``position``-th filling, once it is complete."""
    stage, phase = stage_of(position, ring.STAGES)
    mbarrier.wait(ring.full.index(stage), phase)
    return stage


@gluon.jit
def release_after_load(empty):
    """Gives a stage back that was loaded into registers.

    The next copy comes through another proxy to memory: without the fence it was seen to overtake loads under way.
    """
    fence_async_shared()
    mbarrier.arrive(empty)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers whose phase ends after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def operand_ring(
    desc, step, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, TILES: gl.constexpr = 1
):  # fmt: skip
    """A ring of ``TILES`` blocks in each stage, which ``READERS`` readers empty; without any, it is filled once."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES * TILES] + desc.block_type.shape, desc.layout)
    full = make_barriers(STAGES, 1)
    empty = None
    if READERS > 0:
        empty = make_barriers(STAGES, READERS)
    return OperandRing(
        desc=desc, step=step, tiles=tiles, full=full, empty=empty, STAGES=STAGES, TRANSPOSED=TRANSPOSED
    )  # fmt: skip


@gluon.jit
def ring_beside(ring, desc, step, TRANSPOSED: gl.constexpr):
    """The ring of another operand, which shares the barriers of this one."""
    tiles = gl.allocate_shared_memory(desc.dtype, [ring.STAGES] + desc.block_type.shape, desc.layout)
    return OperandRing(
        desc=desc, step=step, tiles=tiles, full=ring.full, empty=ring.empty, STAGES=ring.STAGES, TRANSPOSED=TRANSPOSED
    )  # fmt: skip


@gluon.jit
def make_ring(
    left_desc, right_desc, COLUMNS: gl.constexpr, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A ring for tiles of ``COLUMNS`` columns, whose stages ``READERS`` readers empty, with ``ORDER`` barriers."""
    DTYPE: gl.constexpr = right_desc.dtype
    RIGHT: gl.constexpr = [STAGES, COLUMNS, STEP] if RIGHT_TRANSPOSED else [STAGES, STEP, COLUMNS]
    left = gl.allocate_shared_memory(DTYPE, [STAGES * 2] + left_desc.block_type.shape, left_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, RIGHT, right_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, READERS)
    order = None
    if ORDER > 0:
        order = make_barriers(ORDER, 1)
    return Ring(
        left=left, right=right, full=full, empty=empty, order=order, LEFT_TRANSPOSED=LEFT_TRANSPOSED,
        RIGHT_TRANSPOSED=RIGHT_TRANSPOSED, STEP=STEP, STAGES=STAGES,
    )  # fmt: skip


@gluon.jit
def make_staging(desc, SLOTS: gl.constexpr):
    return Staging(buffers=gl.allocate_shared_memory(desc.dtype, [2 * SLOTS, HALF, HALF], desc.layout), SLOTS=SLOTS)


@gluon.jit
def column_halves(acc):
    """The left and the right half of the columns, which lie in the same registers as before."""
    COLUMNS: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, acc.type.layout.instr_shape[2]])
    left, right = acc.reshape([acc.shape[0], 2, COLUMNS]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def tma_store(consumer: gl.constexpr, desc, row, column, values, staging, stored):
    """Starts the store of a part of a tile through one of the consumer's buffers; returns how many were stored."""
    # All stores but the last ones have read their buffers.
    tma.store_wait(staging.SLOTS - 1)
    buffer = staging.buffers.index(consumer * staging.SLOTS + stored % staging.SLOTS)
    buffer.store(values.to(buffer.dtype))
    fence_async_shared()
    copy_out(desc, [row, column], buffer)
    return stored + 1
