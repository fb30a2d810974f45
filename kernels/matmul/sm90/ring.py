"""What the mainloops on Hopper share: the ring of stages in shared memory, its barriers, and results on their way out.

Every kernel is warp-specialised. The load warp keeps TMA busy: it fills the stages of a ring, waiting for a stage's
``empty`` barrier and giving its ``full`` barrier to the copies. Two consumers, warp groups of four warps each, wait for
``full``, multiply, and arrive at ``empty``.
"""

from typing import Any

from ...hopper import copy_out, fence_async_shared, gl, gluon, mbarrier, resources, tma
from ...pipeline import init_barriers
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
class Staging:
    """Buffers in shared memory through which a consumer's results leave, ``SLOTS`` for each consumer."""

    buffers: Any
    SLOTS: Any


@gluon.jit
def make_ring(
    left_desc, right_desc, COLUMNS: gl.constexpr, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A ring for tiles of ``COLUMNS`` columns, whose stages ``READERS`` readers empty, with ``ORDER`` barriers."""
    DTYPE: gl.constexpr = right_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    RIGHT: gl.constexpr = [STAGES, COLUMNS, STEP] if RIGHT_TRANSPOSED else [STAGES, STEP, COLUMNS]
    left = gl.allocate_shared_memory(DTYPE, [STAGES * 2] + left_desc.block_type.shape, left_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, RIGHT, right_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_barriers(full, empty, STAGES, READERS)
    order = None
    if ORDER > 0:
        order = gl.allocate_shared_memory(gl.int64, [ORDER, 1], BARRIER)
        for consumer in gl.static_range(ORDER):
            mbarrier.init(order.index(consumer), count=1)
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
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
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
