"""GEMM-reduce on Hopper: consumers hold rows of the kept side, the producer streams the reduced side past them."""

import torch

from ...device import tl
from ...hopper import (
    Matrix,
    fence_async_shared,
    gl,
    gluon,
    matrix,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...pipeline import copy_hidden_tile, init_barriers, matrix_of, release_after_load, specialize, stage_of
from ...tuning import CONSUMER_ROWS, PipelinedReduceConfig
from ..operands import ReduceOperands

_NOWHERE = gl.constexpr(2**30)  # behind every column


@gluon.jit
def _tile(tile, row_tiles, splits, R, lengths_ptr, offsets_ptr, reduced_step, TILE_ROWS: gl.constexpr,
          BLOCK: gl.constexpr):  # fmt: skip
    """(batch entry, its first row, its split, where its reduced rows start, the first of them here and the end)."""
    split = tile % splits
    row = tile // splits % row_tiles * TILE_ROWS
    batch = tile // splits // row_tiles
    if offsets_ptr is not None:
        # Offsets may have 64 bits; TMA's coordinates have 32.
        start = gl.load(offsets_ptr + batch).to(gl.int32)
        length = gl.load(offsets_ptr + batch + 1).to(gl.int32) - start
    else:
        start = batch * reduced_step
        length = R
    if lengths_ptr is not None:
        length = gl.minimum(gl.load(lengths_ptr + batch), length)
    share = gl.cdiv(gl.cdiv(length, BLOCK), splits) * BLOCK
    return batch, row, split, start, split * share, gl.minimum(split * share + share, length)


@gluon.jit
def _produce(
    kept_desc, reduced_desc, lengths_ptr, offsets_ptr, kept_ring, reduced_ring, kept_full, kept_empty, full, empty,
    kept_step, reduced_step, R, tiles, row_tiles, splits,
    BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, KEPT_STAGES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEPT_TRANSPOSED: gl.constexpr, REDUCED_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, _, start, first, end = _tile(
            tile, row_tiles, splits, R, lengths_ptr, offsets_ptr, reduced_step, ROWS * CONSUMERS, BLOCK
        )
        stage, phase = stage_of(turn, KEPT_STAGES)
        mbarrier.wait(kept_empty.index(stage), phase ^ 1)
        mbarrier.expect(kept_full.index(stage), CONSUMERS * kept_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            kept_tile = kept_ring.index(stage * CONSUMERS + consumer)
            copy_hidden_tile(
                kept_desc, batch * kept_step, row + consumer * ROWS, kept_full.index(stage), kept_tile, KEPT_TRANSPOSED
            )
        turn += 1
        for r in range(first, end, BLOCK):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), reduced_desc.block_type.nbytes)
            reduced_tile = reduced_ring.index(stage)
            copy_hidden_tile(reduced_desc, start, r, full.index(stage), reduced_tile, REDUCED_TRANSPOSED)
            position += 1


@gluon.jit
def _larger(left, right):
    return gl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _sum(left, right):
    return left + right


@gluon.jit
def _earlier(left, right):
    return gl.minimum(left, right)


@gluon.jit
def _finite(largest):
    """What is subtracted in exponents: as in torch, nothing where the largest is infinite."""
    return gl.where(gl.abs(largest) == float("inf"), 0.0, largest)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reduce_tile(c, value, other, index, cols, OP: gl.constexpr, INDICES: gl.constexpr):
    """The state of the rows after the columns of ``c``: the value, the sum of exponentials, the index."""
    if OP == "sum" or OP == "mean":
        value += gl.reduce(c, 1, _sum)
    elif OP == "sumsq":
        value += gl.reduce(c * c, 1, _sum)
    elif OP == "logsumexp":
        largest = _larger(value, gl.reduce(c, 1, _larger))
        shift = _finite(largest)
        LOG2E: gl.constexpr = 1.4426950408889634
        exponentials = _exp2(c * LOG2E - gl.expand_dims(shift * LOG2E, 1))
        # Nothing was summed yet where the largest is -inf: a factor of inf would make it NaN.
        factor = gl.where(value == float("-inf"), 0.0, _exp2((_finite(value) - shift) * LOG2E))
        other = other * factor + gl.reduce(exponentials, 1, _sum)
        value = largest
    else:
        largest = gl.reduce(c, 1, _larger)
        if INDICES:
            wins = gl.expand_dims(largest, 1)
            # NaN is not equal to itself, and the first one wins.
            found = gl.reduce(gl.where((c == wins) | (c != c), gl.expand_dims(cols, 0), _NOWHERE), 1, _earlier)
            better = (largest > value) | ((largest != largest) & (value == value))
            index = gl.where(better, found, index)
        value = _larger(value, largest)
    return value, other, index


@gluon.jit
def _prepared(c, mask_ptr, batch, stride_mask_z, stride_mask_r, cols, end, last, OP: gl.constexpr):
    """What is reduced of the product ``c``: nothing of columns that do not take part."""
    NOTHING: gl.constexpr = 0.0 if (OP == "sum") or (OP == "mean") or (OP == "sumsq") else float("-inf")
    if OP == "min":
        c = -c
    elif OP == "absmax":
        c = gl.abs(c)
    if mask_ptr is not None:
        mask_at = mask_ptr + (batch.to(gl.int64) * stride_mask_z + cols.to(gl.int64) * stride_mask_r)
        taking = gl.load(mask_at, mask=cols < end, other=0) != 0
        c = gl.where(gl.expand_dims(taking, 0), c, NOTHING)
    elif last:
        c = gl.where(gl.expand_dims(cols < end, 0), c, NOTHING)
    return c


@gluon.jit
def _consume(
    consumer: gl.constexpr, counts_ptr, values_ptr, sums_ptr, indices_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    kept_ring, reduced_ring, kept_full, kept_empty, full, empty,
    stride_mask_z, stride_mask_r, stride_split, reduced_step, P, R, tiles, row_tiles, splits,
    BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, KEPT_STAGES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEPT_TRANSPOSED: gl.constexpr, REDUCED_TRANSPOSED: gl.constexpr, OP: gl.constexpr, PARTIAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    INDICES: gl.constexpr = indices_ptr is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    NOTHING: gl.constexpr = 0.0 if (OP == "sum") or (OP == "mean") or (OP == "sumsq") else float("-inf")
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, split, _, first, end = _tile(
            tile, row_tiles, splits, R, lengths_ptr, offsets_ptr, reduced_step, ROWS * CONSUMERS, BLOCK
        )
        kept_stage, phase = stage_of(turn, KEPT_STAGES)
        mbarrier.wait(kept_full.index(kept_stage), phase)
        kept = matrix_of(kept_ring.index(kept_stage * CONSUMERS + consumer))
        if KEPT_TRANSPOSED:
            kept = kept.permute((1, 0))
        if IN_REGISTERS:
            kept = kept.load(gl.DotOperandLayout(0, layout, 2))
            release_after_load(kept_empty.index(kept_stage))
        value = gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, layout))
        other = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        index = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, layout))
        for r in range(first, end, BLOCK):
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(full.index(stage), phase)
            reduced = matrix_of(reduced_ring.index(stage))
            if not REDUCED_TRANSPOSED:
                reduced = reduced.permute((1, 0))
            c = gl.zeros([ROWS, BLOCK], gl.float32, layout)
            c = warpgroup_mma_wait(0, [warpgroup_mma(kept, reduced, c, use_acc=False, is_async=True)])
            mbarrier.arrive(empty.index(stage))
            position += 1
            c = _prepared(c, mask_ptr, batch, stride_mask_z, stride_mask_r, cols + r, end, r + BLOCK > end, OP)
            value, other, index = _reduce_tile(c, value, other, index, cols + r, OP, INDICES)
        if not IN_REGISTERS:
            mbarrier.arrive(kept_empty.index(kept_stage))
        turn += 1
        row += consumer * ROWS
        at = split.to(gl.int64) * stride_split + batch.to(gl.int64) * P + row + rows
        inside = rows < P - row
        if OP == "logsumexp":
            if PARTIAL:
                gl.store(sums_ptr + at, other, mask=inside)
            else:
                value = _finite(value) + gl.log(other)
        elif OP == "mean":
            if not PARTIAL:
                value = gl.div_rn(value, gl.zeros_like(value) + gl.load(counts_ptr + batch))
        elif OP == "min":
            if not PARTIAL:
                value = -value
        gl.store(values_ptr + at, value.to(values_ptr.dtype.element_ty), mask=inside)
        if INDICES:
            gl.store(indices_ptr + at, index, mask=inside)


@gluon.jit(do_not_specialize=["stride_split", "kept_step", "reduced_step", "P", "R", "tiles", "row_tiles", "splits"])
def _pipelined_reduce_kernel(
    kept_desc, reduced_desc, counts_ptr, values_ptr, sums_ptr, indices_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    stride_mask_z, stride_mask_r, stride_split, kept_step, reduced_step, P, R, tiles, row_tiles, splits,
    BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, KEPT_STAGES: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    KEPT_TRANSPOSED: gl.constexpr, REDUCED_TRANSPOSED: gl.constexpr, OP: gl.constexpr, PARTIAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = kept_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kept_ring = gl.allocate_shared_memory(
        dtype, [KEPT_STAGES * CONSUMERS] + kept_desc.block_type.shape, kept_desc.layout
    )
    reduced_ring = gl.allocate_shared_memory(dtype, [STAGES] + reduced_desc.block_type.shape, reduced_desc.layout)
    kept_full = gl.allocate_shared_memory(gl.int64, [KEPT_STAGES, 1], barrier)
    kept_empty = gl.allocate_shared_memory(gl.int64, [KEPT_STAGES, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(kept_full, kept_empty, KEPT_STAGES, CONSUMERS)
    init_barriers(full, empty, STAGES, CONSUMERS)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (
        counts_ptr, values_ptr, sums_ptr, indices_ptr, mask_ptr, lengths_ptr, offsets_ptr, kept_ring, reduced_ring,
        kept_full, kept_empty, full, empty, stride_mask_z, stride_mask_r, stride_split, reduced_step, P, R, tiles,
        row_tiles, splits, BLOCK, CONSUMERS, KEPT_STAGES, STAGES, ROWS, KEPT_TRANSPOSED, REDUCED_TRANSPOSED, OP,
        PARTIAL, IN_REGISTERS,
    ), _produce, (
        kept_desc, reduced_desc, lengths_ptr, offsets_ptr, kept_ring, reduced_ring, kept_full, kept_empty, full, empty,
        kept_step, reduced_step, R, tiles, row_tiles, splits, BLOCK, CONSUMERS, KEPT_STAGES, STAGES, ROWS,
        KEPT_TRANSPOSED, REDUCED_TRANSPOSED,
    ))  # fmt: skip


def takes(operands: ReduceOperands, config: PipelinedReduceConfig) -> tuple[Matrix, Matrix] | None:
    """kept and reduced as matrices to copy, or None where this kernel does not compute the call."""
    if operands.arithmetic.activation != "identity":
        return None
    if operands.kept_bias is not None or operands.reduced_bias is not None:
        return None
    if any(vector is not None and vector.stride(0) != 1 for vector in (operands.lengths, operands.offsets)):
        return None
    kept, reduced = matrix(operands.kept), matrix(operands.reduced)
    if kept is None or reduced is None:
        return None
    return kept.padded(config.width), reduced.padded(config.width)


def prepare_reduce(
    operands: ReduceOperands, matrices: tuple[Matrix, Matrix], splits: int, config: PipelinedReduceConfig
) -> Launch:
    """The launch of :func:`launch_reduce`, of matrices that :func:`takes` gave; with several splits, of partials."""
    batch, kept, reduced, _ = operands.sizes()
    kept_matrix, reduced_matrix = matrices
    row_tiles = -(-kept // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles * splits
    return Launch(
        _pipelined_reduce_kernel,
        min(tiles, config.programs),
        (0, 0) if operands.mask is None else operands.mask.stride(),
        (batch * kept, kept_matrix.step, reduced_matrix.step, kept, reduced, tiles, row_tiles, splits),
        (
            config.block, config.consumers, config.kept_stages, config.stages, CONSUMER_ROWS, kept_matrix.transposed,
            reduced_matrix.transposed, operands.arithmetic.op, splits > 1, config.in_registers,
        ),
        geometries=(
            kept_matrix.geometry(CONSUMER_ROWS, config.width),
            reduced_matrix.geometry(config.block, config.width),
        ),
    )  # fmt: skip


def launch_reduce(
    operands: ReduceOperands,
    counts: torch.Tensor | None,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    sums: torch.Tensor | None,
    launch: Launch,
) -> None:
    """Fills values, indices and sums ``[Z, P]``, or with more than one split their partials ``[splits, Z, P]``.

    sums are the sums of exponentials of a logsumexp, of its partials alone; counts are what mean divides by.
    """
    mask = operands.pointers()[4]
    launch((counts, values, sums, indices, mask, operands.lengths, operands.offsets), (operands.kept, operands.reduced))
