"""The product of a tile of logits on Hopper, which the kernels that never write them have in common.

Two consumers of 64 rows each share the columns of a tile, so that one copy of a weight serves both. The second one
stays some stages behind the first one: while one of them is busy with its tile, the other one has the matrix units.
"""

import torch

from ...hopper import Matrix, copy_in, gl, gluon, mbarrier, untransposed, warpgroup_mma, warpgroup_mma_wait
from ...pipeline import init_barriers, stage_of
from ...tuning import CONSUMER_ROWS

# Rows of a consumer, and of a program's tile.
ROWS = gl.constexpr(CONSUMER_ROWS)
BAND = gl.constexpr(2 * CONSUMER_ROWS)


def takes(x: torch.Tensor, linear_weight: torch.Tensor) -> tuple[Matrix, Matrix] | None:
    """Both as matrices to copy, or None where these kernels do not compute their product."""
    left, right = untransposed(x), untransposed(linear_weight)
    return None if left is None or right is None else (left, right)


@gluon.jit
def make_ring(x_desc, w_desc, COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """The stages of both operands, and the barriers: full, empty, and the lead of the first consumer."""
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, STEP], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    lead = gl.allocate_shared_memory(gl.int64, [1], barrier)
    init_barriers(full, empty, STAGES, 2)
    mbarrier.init(lead, count=1)
    return x_ring, w_ring, full, empty, lead


@gluon.jit
def copy_tile(
    x_desc, w_desc, x_ring, w_ring, full, empty, row, column, inner, position, STEP: gl.constexpr, STAGES: gl.constexpr
):
    """Starts the copies of what a tile's product reads, from ``position`` of the ring on; returns the one behind."""
    BYTES: gl.constexpr = 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes
    for k in range(0, inner, STEP):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        copy_in(x_desc, [row, k], full.index(stage), x_ring.index(stage * 2))
        copy_in(x_desc, [row + ROWS, k], full.index(stage), x_ring.index(stage * 2 + 1))
        copy_in(w_desc, [column, k], full.index(stage), w_ring.index(stage))
        position += 1
    return position


@gluon.jit
def begin(bias_ptr, column, V, COLUMNS: gl.constexpr):
    """What the sums of a consumer's tile begin with: the bias of its columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    if bias_ptr is not None:
        cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        acc += gl.expand_dims(gl.load(bias_ptr + gl.minimum(cols, V - 1)).to(gl.float32), 0)
    return acc


@gluon.jit
def multiply(
    consumer: gl.constexpr, acc, x_ring, w_ring, full, empty, lead, count, steps,
    STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Adds the product of the ``count``-th tile of this program to the consumer's rows of it."""
    # A tile of fewer steps than there are stages would let the first consumer pass the barrier twice.
    leads = steps >= STAGES
    if LEAD > 0 and consumer == 1:
        mbarrier.wait(lead, count & 1, pred=leads)
    position = count * steps
    for step in range(steps):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(full.index(stage), phase)
        right = w_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(stage * 2 + consumer), right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if step > 0:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        if LEAD > 0 and consumer == 0:
            # No branch: behind one the assembler would have the products wait for one another.
            mbarrier.arrive(lead, pred=leads & (step == LEAD - 1))
        position += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((position - 1) % STAGES))
    return acc


@gluon.jit
def halves(x):
    """The left and the right half of the columns; they lie in the same registers as before."""
    HALF: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)
