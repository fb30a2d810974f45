"""Gradient of the reduced side on Hopper, where an index was found: a product with a matrix that is built in registers.

    out[z,r] = Σ_p W[r,p] kept[z,p],    W[r,p] = weights[z,p] where indices[z,p] = r, else 0

Consumers hold the sums of 64 reduced rows each, the producer streams the kept rows past them.
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
from ...launching import Launch
from ...pipeline import copy_hidden_tile, init_barriers, matrix_of, specialize, stage_of
from ...tuning import CONSUMER_ROWS, OneHotPipeline


@gluon.jit
def _produce(
    kept_desc, ring, full, empty, kept_step, P, tiles, row_tiles,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    position = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch = tile // row_tiles
        for p in range(0, P, BLOCK):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), kept_desc.block_type.nbytes)
            copy_hidden_tile(kept_desc, batch * kept_step, p, full.index(stage), ring.index(stage), TRANSPOSED)
            position += 1


@gluon.jit
def _one_hot(rows, index, weight, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights ``[rows, index]`` where the two are equal, as the left side of a product."""
    found = gl.where(rows == gl.expand_dims(index, 0), gl.expand_dims(weight, 0), 0.0)
    return gl.convert_layout(found.to(dtype), layout)


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_desc, indices_ptr, weights_ptr, ring, out_tiles, full, empty, P, R, tiles, row_tiles,
    WIDTH: gl.constexpr, BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    one_hot_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, one_hot_layout))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, one_hot_layout))
    position = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch = tile // row_tiles
        row = tile % row_tiles * (ROWS * CONSUMERS) + consumer * ROWS
        entry = batch.to(gl.int64) * P
        indices_at = indices_ptr + entry
        weights_at = weights_ptr + entry
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        rows_here = gl.expand_dims(row + rows, 1)
        index = gl.load(indices_at + cols, mask=cols < P, other=-1)
        weight = gl.load(weights_at + cols, mask=cols < P, other=0.0)
        one_hot = _one_hot(rows_here, index, weight, dtype, left_layout)
        index = gl.load(indices_at + BLOCK + cols, mask=cols < P - BLOCK, other=-1)
        weight = gl.load(weights_at + BLOCK + cols, mask=cols < P - BLOCK, other=0.0)
        for p in range(0, P, BLOCK):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(full.index(stage), phase)
            kept = matrix_of(ring.index(stage))
            if TRANSPOSED:
                kept = kept.permute((1, 0))
            acc = warpgroup_mma(one_hot, kept, acc, is_async=True)
            # Meanwhile the left side of the next product is built, and the numbers for the one after it are fetched.
            one_hot_next = _one_hot(rows_here, index, weight, dtype, left_layout)
            next_cols = p + 2 * BLOCK + cols
            index = gl.load(indices_at + next_cols, mask=next_cols < P, other=-1)
            weight = gl.load(weights_at + next_cols, mask=next_cols < P, other=0.0)
            acc, one_hot = warpgroup_mma_wait(0, [acc, one_hot])
            mbarrier.arrive(empty.index(stage))
            position += 1
            one_hot = one_hot_next
        # The tile of the turn before may still be on its way out.
        tma.store_wait(0)
        out_tile = out_tiles.index(consumer)
        out_tile.reshape([ROWS, WIDTH]).store(acc.to(dtype))
        fence_async_shared()
        if row < R:
            copy_out(out_desc, [batch, row, 0], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kept_step", "P", "R", "tiles", "row_tiles"])
def _pipelined_one_hot_kernel(
    kept_desc, out_desc, indices_ptr, weights_ptr, kept_step, P, R, tiles, row_tiles,
    WIDTH: gl.constexpr, BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = kept_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(dtype, [STAGES] + kept_desc.block_type.shape, kept_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(full, empty, STAGES, CONSUMERS)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (
        out_desc, indices_ptr, weights_ptr, ring, out_tiles, full, empty, P, R, tiles, row_tiles, WIDTH, BLOCK,
        CONSUMERS, STAGES, ROWS, TRANSPOSED,
    ), _produce, (
        kept_desc, ring, full, empty, kept_step, P, tiles, row_tiles, BLOCK, STAGES, TRANSPOSED,
    ))  # fmt: skip


def takes_one_hot(kept: torch.Tensor, config: OneHotPipeline | None) -> Matrix | None:
    """kept ``[Z, P, K]`` or ``[P, K]`` as a matrix to copy, or None where this kernel does not compute the product."""
    if config is None:
        return None
    found = matrix(kept)
    return None if found is None else found.padded(config.width)


def prepare_one_hot(kept: Matrix, shape: tuple[int, int, int], P: int, config: OneHotPipeline) -> Launch:
    """A launch that fills out, contiguous of this shape ``[Z, R, K]`` and of kept's dtype.

    Its pointers are the indices, int32, and the weights, float32, both contiguous ``[Z, P]``; its bases kept and out.
    """
    batch, reduced, width = shape
    row_tiles = -(-reduced // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles
    return Launch(
        _pipelined_one_hot_kernel,
        min(tiles, config.programs),
        (),
        (kept.step, P, reduced, tiles, row_tiles),
        (config.width, config.block, config.consumers, config.stages, CONSUMER_ROWS, kept.transposed),
        geometries=(
            kept.geometry(config.block, config.width),
            Geometry([batch, reduced, width], [reduced * width, width, 1], [1, CONSUMER_ROWS, config.width]),
        ),
    )
