"""GEMM-reduce on Hopper: consumers hold rows of the kept side, the load warp streams the reduced side past them."""

from typing import Any

from ...device import tl
from ...hopper import (
    Matrix,
    fence_async_shared,
    gl,
    gluon,
    matrix,
    mbarrier,
    resources,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, operand_ring, release_after_load, wait_full
from ...matmul.sm90.roles import specialize
from ...tiles import split_range
from ...tuning import CONSUMER_ROWS, Sm90ReduceConfig
from ..operands import ReduceOperands

_NOWHERE = gl.constexpr(2**30)  # behind every column


@resources
class _Schedule:
    """Tiles of ``ROWS`` kept rows, each over one of ``splits`` parts of its entry's reduced rows.

    An entry has ``R`` of those, or the rows between two offsets, and of them no more than its length, if it has one.
    """

    tiles: Any
    row_tiles: Any
    splits: Any
    R: Any
    reduced_step: Any
    lengths_ptr: Any
    offsets_ptr: Any
    ROWS: Any
    BLOCK: Any


@resources
class _Reduction:
    """What is reduced with which operation, and where the results of all ``P`` kept rows of an entry go."""

    counts_ptr: Any
    values_ptr: Any
    sums_ptr: Any
    indices_ptr: Any
    mask_ptr: Any
    stride_mask_z: Any
    stride_mask_r: Any
    stride_split: Any
    P: Any
    OP: Any
    NOTHING: Any
    PARTIAL: Any


@gluon.jit
def _tile_at(schedule, index):
    """(batch entry, its first row, its split, where its reduced rows start, the first of them here and the end)."""
    split = index % schedule.splits
    row = index // schedule.splits % schedule.row_tiles * schedule.ROWS
    batch = index // schedule.splits // schedule.row_tiles
    if schedule.offsets_ptr is not None:
        # Offsets may have 64 bits; TMA's coordinates have 32.
        start = gl.load(schedule.offsets_ptr + batch).to(gl.int32)
        length = gl.load(schedule.offsets_ptr + batch + 1).to(gl.int32) - start
    else:
        start = batch * schedule.reduced_step
        length = schedule.R
    if schedule.lengths_ptr is not None:
        length = gl.minimum(gl.load(schedule.lengths_ptr + batch), length)
    first, end = split_range(split, length, schedule.splits, schedule.BLOCK)
    return batch, row, split, start, first, end


@gluon.jit
def _load(kept, reduced, schedule, CONSUMERS: gl.constexpr):
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row, _, start, first, end = _tile_at(schedule, index)
        stage, full = acquire(kept, turn, CONSUMERS * kept.desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            load_block(kept, batch * kept.step, row + consumer * HALF, full, stage * CONSUMERS + consumer)
        turn += 1
        for r in range(first, end, schedule.BLOCK):
            stage, full = acquire(reduced, position, reduced.desc.block_type.nbytes)
            load_block(reduced, start, r, full, stage)
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
def _prepared(c, reduction, batch, cols, end, last):
    """What is reduced of the product ``c``: nothing of columns that do not take part."""
    if reduction.OP == "min":
        c = -c
    elif reduction.OP == "absmax":
        c = gl.abs(c)
    if reduction.mask_ptr is not None:
        mask_at = reduction.mask_ptr + (
            batch.to(gl.int64) * reduction.stride_mask_z + cols.to(gl.int64) * reduction.stride_mask_r
        )
        taking = gl.load(mask_at, mask=cols < end, other=0) != 0
        c = gl.where(gl.expand_dims(taking, 0), c, reduction.NOTHING)
    elif last:
        c = gl.where(gl.expand_dims(cols < end, 0), c, reduction.NOTHING)
    return c


@gluon.jit
def _store(reduction, value, other, index, batch, split, row):
    """Stores the results of a consumer's rows, or the partials of one split."""
    rows = gl.arange(0, HALF, value.type.layout)
    at = split.to(gl.int64) * reduction.stride_split + batch.to(gl.int64) * reduction.P + row + rows
    inside = rows < reduction.P - row
    if reduction.OP == "logsumexp":
        if reduction.PARTIAL:
            gl.store(reduction.sums_ptr + at, other, mask=inside)
        else:
            value = _finite(value) + gl.log(other)
    elif reduction.OP == "mean":
        if not reduction.PARTIAL:
            value = gl.div_rn(value, gl.zeros_like(value) + gl.load(reduction.counts_ptr + batch))
    elif reduction.OP == "min":
        if not reduction.PARTIAL:
            value = -value
    gl.store(reduction.values_ptr + at, value.to(reduction.values_ptr.dtype.element_ty), mask=inside)
    if reduction.indices_ptr is not None:
        gl.store(reduction.indices_ptr + at, index, mask=inside)


@gluon.jit
def _consume(
    consumer: gl.constexpr, kept, reduced, schedule, reduction, CONSUMERS: gl.constexpr, IN_REGISTERS: gl.constexpr
):  # fmt: skip
    BLOCK: gl.constexpr = schedule.BLOCK
    INDICES: gl.constexpr = reduction.indices_ptr is not None
    layout: gl.constexpr = zeros(HALF, BLOCK).type.layout
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row, split, _, first, end = _tile_at(schedule, tile)
        kept_stage = wait_full(kept, turn)
        kept_tile = rows_first(kept, kept_stage * CONSUMERS + consumer)
        if IN_REGISTERS:
            kept_tile = kept_tile.load(gl.DotOperandLayout(0, layout, 2))
            release_after_load(kept.empty.index(kept_stage))
        value = gl.full([HALF], reduction.NOTHING, gl.float32, gl.SliceLayout(1, layout))
        other = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, layout))
        index = gl.zeros([HALF], gl.int32, gl.SliceLayout(1, layout))
        for r in range(first, end, BLOCK):
            stage = wait_full(reduced, position)
            reduced_tile = rows_first(reduced, stage).permute((1, 0))
            c = warpgroup_mma(kept_tile, reduced_tile, zeros(HALF, BLOCK), use_acc=False, is_async=True)
            c = warpgroup_mma_wait(0, [c])
            mbarrier.arrive(reduced.empty.index(stage))
            position += 1
            c = _prepared(c, reduction, batch, cols + r, end, r + BLOCK > end)
            value, other, index = _reduce_tile(c, value, other, index, cols + r, reduction.OP, INDICES)
        if not IN_REGISTERS:
            mbarrier.arrive(kept.empty.index(kept_stage))
        turn += 1
        _store(reduction, value, other, index, batch, split, row + consumer * HALF)


@gluon.jit(do_not_specialize=["stride_split", "kept_step", "reduced_step", "P", "R", "tiles", "row_tiles", "splits"])
def _sm90_reduce_kernel(
    kept_desc, reduced_desc, counts_ptr, values_ptr, sums_ptr, indices_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    stride_mask_z, stride_mask_r, stride_split, kept_step, reduced_step, P, R, tiles, row_tiles, splits,
    BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, KEPT_STAGES: gl.constexpr, STAGES: gl.constexpr,
    KEPT_TRANSPOSED: gl.constexpr, REDUCED_TRANSPOSED: gl.constexpr, OP: gl.constexpr, PARTIAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    NOTHING: gl.constexpr = 0.0 if (OP == "sum") or (OP == "mean") or (OP == "sumsq") else float("-inf")
    kept = operand_ring(kept_desc, kept_step, KEPT_TRANSPOSED, KEPT_STAGES, CONSUMERS, CONSUMERS)
    reduced = operand_ring(reduced_desc, reduced_step, REDUCED_TRANSPOSED, STAGES, CONSUMERS)
    schedule = _Schedule(
        tiles=tiles, row_tiles=row_tiles, splits=splits, R=R, reduced_step=reduced_step, lengths_ptr=lengths_ptr,
        offsets_ptr=offsets_ptr, ROWS=HALF * CONSUMERS, BLOCK=BLOCK,
    )  # fmt: skip
    reduction = _Reduction(
        counts_ptr=counts_ptr, values_ptr=values_ptr, sums_ptr=sums_ptr, indices_ptr=indices_ptr, mask_ptr=mask_ptr,
        stride_mask_z=stride_mask_z, stride_mask_r=stride_mask_r, stride_split=stride_split, P=P, OP=OP,
        NOTHING=NOTHING, PARTIAL=PARTIAL,
    )  # fmt: skip
    fence_async_shared()
    specialize(
        CONSUMERS, _consume, (kept, reduced, schedule, reduction, CONSUMERS, IN_REGISTERS),
        _load, (kept, reduced, schedule, CONSUMERS),
    )  # fmt: skip


def takes(operands: ReduceOperands, config: Sm90ReduceConfig) -> tuple[Matrix, Matrix] | None:
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
    operands: ReduceOperands, matrices: tuple[Matrix, Matrix], splits: int, config: Sm90ReduceConfig
) -> Launch:
    """The launch for matrices that :func:`takes` gave.

    Its tensors are kept and reduced, what mean divides by, and those to fill ``[Z, P]``, or with several splits their
    partials ``[splits, Z, P]``: values, the sums of exponentials of a logsumexp's partials, and indices; then the mask,
    lengths and offsets.
    """
    batch, kept, reduced, _ = operands.sizes()
    kept_matrix, reduced_matrix = matrices
    row_tiles = -(-kept // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles * splits
    return Launch(
        _sm90_reduce_kernel,
        min(tiles, config.programs),
        (0, 0) if operands.mask is None else operands.mask.stride(),
        (batch * kept, kept_matrix.step, reduced_matrix.step, kept, reduced, tiles, row_tiles, splits),
        (
            config.block, config.consumers, config.kept_stages, config.stages, kept_matrix.transposed,
            reduced_matrix.transposed, operands.arithmetic.op, splits > 1, config.in_registers,
        ),
        geometries=(
            kept_matrix.geometry(CONSUMER_ROWS, config.width),
            reduced_matrix.geometry(config.block, config.width),
        ),
    )  # fmt: skip
