"""Shared by the mainloops on Hopper: the ring of stages in shared memory, its mbarriers, and staging buffers.

The load warp (``roles``) fills the stages of a ring: it waits on a stage's ``empty`` barrier and passes its ``full``
barrier to the TMA copies. Consumers wait on ``full``, multiply, and arrive on ``empty``.
"""

from typing import NamedTuple

from ...hopper import Resource, copy_out, fence_async_shared, gl, gluon, mbarrier, reinterpret, resources, tma
from ...tuning import CONSUMER_ROWS

# HALF: rows of one wgmma; also rows and columns of the quarter of a tile that an epilogue processes at once.
HALF = gl.constexpr(CONSUMER_ROWS)
TILE = gl.constexpr(2 * CONSUMER_ROWS)


class Stages(NamedTuple):
    """What a kernel keeps in shared memory: a ring of ``stages`` stages, each a ``step`` of the inner axis.

    Besides, for each consumer, ``slots`` staging buffers of results and ``z_stages`` quarters of pre-activations. Of a
    step of a low-rank product ``low_rank_columns`` are multiplied.
    """

    step: int
    stages: int
    slots: int
    z_stages: int = 0
    low_rank_columns: int = 0


@resources("left right full empty order low_rank low_rank_steps LEFT_TRANSPOSED RIGHT_TRANSPOSED STEP COLUMNS STAGES")
class Ring(Resource):
    """``STAGES`` stages of both operands, each a ``STEP`` of the inner axis, oriented as in global memory.

    The left operand of a stage has two halves of rows. Consumers wait for one another on the barriers of ``order``: see
    their mainloops. If ``low_rank`` is given, the first ``low_rank_steps`` steps of a tile have operands of more
    bits: it is the ring of the same stages with such operands in them, of whose steps ``COLUMNS`` are multiplied.
    """


@resources("desc step tiles full empty STAGES TRANSPOSED")
class OperandRing(Resource):
    """A ring of one operand, a matrix or a batch of them: a stage has one or several blocks of rows.

    For a ``TRANSPOSED`` matrix these are blocks of columns, oriented as in global memory. Batch entries are ``step``
    rows apart, or have an axis of their own: see ``hopper.Matrix``.
    """


@resources("buffers SLOTS APART")
class Staging(Resource):
    """Staging buffers in shared memory for TMA stores of results, ``SLOTS`` for each consumer, ``APART`` from the next.

    Buffers may be used for values of fewer bits, of which ``APART`` fit into one.
    """


@gluon.jit
def stage_of(position, STAGES: gl.constexpr):
    """(stage, phase of its full barrier) of a ring's ``position``-th filling. The empty barrier is a phase behind."""
    return position % STAGES, (position // STAGES) & 1


@gluon.jit
def acquire(ring, position, BYTES: gl.constexpr):
    """(stage, its full barrier) for the load warp, once all readers have released it; ``BYTES`` will be copied."""
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
    """Release a stage that was loaded into registers.

    TMA writes through the async proxy: without the fence the next copy was seen to overtake pending loads.
    """
    fence_async_shared()
    mbarrier.arrive(empty)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` mbarriers whose phase completes after ``ARRIVALS`` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def operand_ring(
    desc, step, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, TILES: gl.constexpr = 1
):  # fmt: skip
    """A ring with ``TILES`` blocks per stage, which ``READERS`` readers release; without readers it is filled once."""
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
    """The ring of another operand, which shares the barriers of ``ring``."""
    tiles = gl.allocate_shared_memory(desc.dtype, [ring.STAGES] + desc.block_type.shape, desc.layout)
    return OperandRing(
        desc=desc, step=step, tiles=tiles, full=ring.full, empty=ring.empty, STAGES=ring.STAGES, TRANSPOSED=TRANSPOSED
    )  # fmt: skip


@gluon.jit
def make_ring(
    left_desc, right_desc, COLUMNS: gl.constexpr, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A ring for tiles of ``COLUMNS`` columns; ``READERS`` readers release a stage; ``ORDER`` order barriers."""
    DTYPE: gl.constexpr = right_desc.dtype
    RIGHT: gl.constexpr = [STAGES, COLUMNS, STEP] if RIGHT_TRANSPOSED else [STAGES, STEP, COLUMNS]
    left = gl.allocate_shared_memory(DTYPE, [STAGES * 2] + left_desc.block_type.shape, left_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, RIGHT, right_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, READERS)
    order = None
    if ORDER > 0:
        order = make_barriers(ORDER, 1)
    return Ring(
        left=left, right=right, full=full, empty=empty, order=order, low_rank=None, low_rank_steps=0,
        LEFT_TRANSPOSED=LEFT_TRANSPOSED, RIGHT_TRANSPOSED=RIGHT_TRANSPOSED, STEP=STEP, COLUMNS=STEP, STAGES=STAGES,
    )  # fmt: skip


@gluon.jit
def with_low_rank(ring, left_desc, right_desc, rank, COLUMNS: gl.constexpr):
    """The ring, which also takes a low-rank product of ``rank`` terms; its operands may have more bits than others."""
    if left_desc is None:
        return ring
    elif left_desc.dtype == ring.left.dtype:
        return ring
    else:
        gl.static_assert(ring.RIGHT_TRANSPOSED, "as all 8-bit operands are")
        # As many bytes to a step, so fewer columns.
        STEP: gl.constexpr = left_desc.block_type.shape[1]
        LEFT: gl.constexpr = [2 * ring.STAGES] + left_desc.block_type.shape
        RIGHT: gl.constexpr = [ring.STAGES, ring.right.shape[1], STEP]
        low_rank = Ring(
            left=reinterpret(ring.left, left_desc.dtype, LEFT, left_desc.layout),
            right=reinterpret(ring.right, right_desc.dtype, RIGHT, right_desc.layout),
            full=ring.full, empty=ring.empty, order=ring.order, low_rank=None, low_rank_steps=0,
            LEFT_TRANSPOSED=ring.LEFT_TRANSPOSED, RIGHT_TRANSPOSED=ring.RIGHT_TRANSPOSED, STEP=STEP, COLUMNS=COLUMNS,
            STAGES=ring.STAGES,
        )  # fmt: skip
        return Ring(
            left=ring.left, right=ring.right, full=ring.full, empty=ring.empty, order=ring.order, low_rank=low_rank,
            low_rank_steps=gl.cdiv(rank, STEP), LEFT_TRANSPOSED=ring.LEFT_TRANSPOSED,
            RIGHT_TRANSPOSED=ring.RIGHT_TRANSPOSED, STEP=ring.STEP, COLUMNS=ring.COLUMNS, STAGES=ring.STAGES,
        )  # fmt: skip


@gluon.jit
def make_staging(desc, SLOTS: gl.constexpr):
    buffers = gl.allocate_shared_memory(desc.dtype, [2 * SLOTS, HALF, HALF], desc.layout)
    return Staging(buffers=buffers, SLOTS=SLOTS, APART=1)


@gluon.jit
def staging_of(desc, staging):
    """The same buffers for another matrix, which may have fewer bits."""
    if desc.dtype == staging.buffers.dtype:
        return staging
    else:
        APART: gl.constexpr = staging.buffers.dtype.primitive_bitwidth // desc.dtype.primitive_bitwidth
        SHAPE: gl.constexpr = [2 * staging.SLOTS * APART, HALF, HALF]
        buffers = reinterpret(staging.buffers, desc.dtype, SHAPE, desc.layout)
        return Staging(buffers=buffers, SLOTS=staging.SLOTS, APART=APART)


@gluon.jit
def column_halves(acc):
    """The left and the right half of the columns, which stay in the same registers."""
    COLUMNS: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, acc.type.layout.instr_shape[2]])
    left, right = acc.reshape([acc.shape[0], 2, COLUMNS]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def tma_store(consumer: gl.constexpr, desc, row, column, values, staging, stored):
    """Start the TMA store of a part of a tile from a staging buffer of this consumer; return the number of stores."""
    # At most SLOTS - 1 stores stay pending, so the one that used this buffer has read it.
    tma.store_wait(staging.SLOTS - 1)
    buffer = staging.buffers.index((consumer * staging.SLOTS + stored % staging.SLOTS) * staging.APART)
    buffer.store(values.to(buffer.dtype))
    fence_async_shared()
    copy_out(desc, [row, column], buffer)
    return stored + 1
