"""The mainloop of plain products: both consumers compute one tile together, each of them half of its rows.

A tile is ``TILE × WIDE``, and one matrix instruction multiplies 64 rows by 256 columns. For each step of the inner axis
the SM loads 48 KiB for as many products as take 64 KiB where consumers have tiles of 128 × 128 of their own
(``gemm_epilogue.pipelined.products``), and the matrix unit reads a sixth less of shared memory. In return nothing is
multiplied while results are stored: an epilogue that computes much is better off there.
"""

from ...gemm_epilogue.pipelined.products import HALF, TILE, column_halves, send
from ...hopper import copy_in, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from ...pipeline import init_barriers, stage_of
from ...tuning.grouped_gemm_pipelines import COOPERATIVE_COLUMNS

WIDE = gl.constexpr(COOPERATIVE_COLUMNS)


@gluon.jit
def make_ring(
    left_desc, right_desc, LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The stages of the left and the right operand, as they lie in memory, and the barriers: full and empty."""
    DTYPE: gl.constexpr = right_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LEFT: gl.constexpr = [STAGES * 2, STEP, HALF] if LEFT_TRANSPOSED else [STAGES * 2, HALF, STEP]
    RIGHT: gl.constexpr = [STAGES, WIDE, STEP] if RIGHT_TRANSPOSED else [STAGES, STEP, WIDE]
    left = gl.allocate_shared_memory(DTYPE, LEFT, left_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, RIGHT, right_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_barriers(full, empty, STAGES, 2)
    return left, right, full, empty


@gluon.jit
def copy_step(
    left_desc, right_desc, left_ring, right_ring, full, empty, upper, lower, right_place, position,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies one step into the ring: both halves of the left operand, from those places on, and the right operand."""
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    stage, phase = stage_of(position, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    copy_in(left_desc, upper, full.index(stage), left_ring.index(stage * 2))
    copy_in(left_desc, lower, full.index(stage), left_ring.index(stage * 2 + 1))
    copy_in(right_desc, right_place, full.index(stage), right_ring.index(stage))
    return position + 1


@gluon.jit
def multiply(
    consumer: gl.constexpr, acc, left_ring, right_ring, full, empty, position, steps,
    LEFT_TRANSPOSED: gl.constexpr, RIGHT_TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds to this consumer's rows the product whose operands lie in the ring from ``position`` on."""
    for step in range(steps):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(full.index(stage), phase)
        left, right = left_ring.index(stage * 2 + consumer), right_ring.index(stage)
        if LEFT_TRANSPOSED:
            left = left.permute((1, 0))
        if RIGHT_TRANSPOSED:
            right = right.permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if step > 0:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        position += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((position - 1) % STAGES))
    return acc


@gluon.jit
def store(consumer: gl.constexpr, desc, row, column, acc, places, sent, PLACES: gl.constexpr):
    """Stores a consumer's rows, 64 columns at a time; returns how many such parts it has stored so far."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    sides = column_halves(acc, layout)
    for side in gl.static_range(2):
        left, right = column_halves(sides[side], half_layout)
        sent = send(consumer, desc, row, column + side * TILE, left, places, sent, PLACES)
        sent = send(consumer, desc, row, column + side * TILE + HALF, right, places, sent, PLACES)
    return sent
