"""Gradient of the reduced side of a maximum on Hopper: a product with a one-hot matrix that is built in registers.

    out[z,r] = Σ_p W[r,p] kept[z,p],    W[r,p] = weights[z,p] where indices[z,p] = r, else 0

Consumers hold the sums of 64 reduced rows each, the load warp streams the kept rows past them.
"""

import torch

from ...hopper import (
    Geometry,
    Matrix,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    matrix,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch, ceil_div
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, operand_ring, wait_full
from ...matmul.sm90.roles import warp_specialize
from ...matmul.sm90.schedules import RowSchedule, rows_at
from ...tuning import CONSUMER_ROWS, OneHotPipeline


@gluon.jit
def _load(kept, schedule, P, BLOCK: gl.constexpr):
    position = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, _ = rows_at(schedule, index)
        for p in range(0, P, BLOCK):
            stage, full = acquire(kept, position, kept.desc.block_type.nbytes)
            load_block(kept, batch * kept.step, p, full, stage)
            position += 1


@gluon.jit
def _one_hot(rows, index, weight, dtype: gl.constexpr, layout: gl.constexpr):
    """The one-hot tile ``[rows, index]``: the weights where both are equal, in the layout of a left operand."""
    found = gl.where(rows == gl.expand_dims(index, 0), gl.expand_dims(weight, 0), 0.0)
    return gl.convert_layout(found.to(dtype), layout)


@gluon.jit
def _chosen(indices_ptr, weights_ptr, entry, cols, P):
    """(index, weight) of the kept rows ``cols`` of a batch entry."""
    index = gl.load(indices_ptr + entry + cols, mask=cols < P, other=-1)
    return index, gl.load(weights_ptr + entry + cols, mask=cols < P, other=0.0)


@gluon.jit
def _consume(
    consumer: gl.constexpr, kept, schedule, indices_ptr, weights_ptr, out, out_tiles, P, R, WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = kept.desc.dtype
    left_layout: gl.constexpr = gl.DotOperandLayout(0, zeros(HALF, WIDTH).type.layout, 2)
    one_hot_layout: gl.constexpr = zeros(HALF, BLOCK).type.layout
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, one_hot_layout))
    rows = gl.arange(0, HALF, gl.SliceLayout(1, one_hot_layout))
    position = 0
    for tile in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, tile)
        row += consumer * HALF
        entry = batch.to(gl.int64) * P
        acc = zeros(HALF, WIDTH)
        rows_here = gl.expand_dims(row + rows, 1)
        index, weight = _chosen(indices_ptr, weights_ptr, entry, cols, P)
        one_hot = _one_hot(rows_here, index, weight, DTYPE, left_layout)
        index, weight = _chosen(indices_ptr, weights_ptr, entry, BLOCK + cols, P)
        for p in range(0, P, BLOCK):
            stage = wait_full(kept, position)
            acc = warpgroup_mma(one_hot, rows_first(kept, stage), acc, is_async=True)
            # Meanwhile build the left operand of the next product, and load the indices of the one after it.
            one_hot_next = _one_hot(rows_here, index, weight, DTYPE, left_layout)
            index, weight = _chosen(indices_ptr, weights_ptr, entry, p + 2 * BLOCK + cols, P)
            acc, one_hot = warpgroup_mma_wait(0, [acc, one_hot])
            mbarrier.arrive(kept.empty.index(stage))
            position += 1
            one_hot = one_hot_next
        # The store of the previous tile may still read the buffer.
        tma.store_wait(0)
        out_tile = out_tiles.index(consumer)
        out_tile.reshape([HALF, WIDTH]).store(acc.to(DTYPE))
        fence_async_shared()
        if row < R:
            copy_out(out, [batch, row, 0], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kept_step", "P", "R", "tiles", "row_tiles"])
def _sm90_one_hot_kernel(
    kept_desc, out_desc, indices_ptr, weights_ptr, offsets_ptr, ends_ptr, kept_step, P, R, tiles, row_tiles,
    WIDTH: gl.constexpr, BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    schedule = RowSchedule(tiles=tiles, entry_tiles=row_tiles, ROWS=HALF * CONSUMERS)
    kept = operand_ring(kept_desc, kept_step, TRANSPOSED, STAGES, CONSUMERS)
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    fence_async_shared()
    warp_specialize(
        CONSUMERS, _consume, (kept, schedule, indices_ptr, weights_ptr, out_desc, out_tiles, P, R, WIDTH, BLOCK),
        _load, (kept, schedule, P, BLOCK),
    )  # fmt: skip


def takes_one_hot(kept: torch.Tensor, config: OneHotPipeline | None) -> Matrix | None:
    """kept ``[Z, P, K]`` or ``[P, K]`` as TMA sees it, or None if this kernel does not support the product."""
    if config is None:
        return None
    found = matrix(kept)
    return None if found is None else found.padded(config.width)


def prepare_one_hot(kept: Matrix, shape: tuple[int, int, int], P: int, config: OneHotPipeline) -> Launch:
    """The launch that fills out, contiguous of this shape ``[Z, R, K]`` and of kept's dtype.

    Its tensors are kept, out, the indices, int32, and the weights, float32, both contiguous ``[Z, P]``; and None twice:
    these are the offsets and block ends of packed rows in MaxSim's generic kernel.
    """
    batch, reduced, width = shape
    row_tiles = ceil_div(reduced, CONSUMER_ROWS * config.consumers)
    tiles = batch * row_tiles
    return Launch(
        _sm90_one_hot_kernel,
        min(tiles, config.programs),
        (),
        (kept.step, P, reduced, tiles, row_tiles),
        (config.width, config.block, config.consumers, config.stages, kept.transposed),
        geometries=(
            kept.geometry(config.block, config.width),
            Geometry([batch, reduced, width], [reduced * width, width, 1], [1, CONSUMER_ROWS, config.width]),
        ),
    )
