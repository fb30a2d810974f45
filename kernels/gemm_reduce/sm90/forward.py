"""GEMM-reduce on Hopper: consumers hold rows of the kept side, the load warp streams the reduced side past them."""

from ...hopper import (
    Matrix,
    Resource,
    fence_async_shared,
    gl,
    gluon,
    matrix,
    mbarrier,
    resources,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch, ceil_div
from ...matmul.generic.operands import strides
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, operand_ring, release_after_load, wait_full
from ...matmul.sm90.roles import warp_specialize
from ...tiles import split_range
from ...tuning import CONSUMER_ROWS, Sm90ReduceConfig
from ..operands import ReduceOperands, entry_rows
from ..reduction import Results, State, identity, reduce_tile, store_state


@resources("tiles row_tiles splits R reduced_step lengths_ptr offsets_ptr ROWS BLOCK")
class _Schedule(Resource):
    """Tiles of ``ROWS`` kept rows, each over one of ``splits`` ranges of the reduced rows of its entry.

    An entry has ``R`` reduced rows, or those between two offsets; only those before its length are active.
    """


@gluon.jit
def _tile_at(schedule, index):
    """(batch entry, first kept row, split, start of the entry's reduced rows, first and end of the split's)."""
    split = index % schedule.splits
    row = index // schedule.splits % schedule.row_tiles * schedule.ROWS
    batch = index // schedule.splits // schedule.row_tiles
    start, length, _ = entry_rows(batch, schedule.lengths_ptr, schedule.offsets_ptr, (1, 1), schedule.R)
    if schedule.offsets_ptr is not None:
        # Offsets may have 64 bits; TMA's coordinates have 32.
        start = start.to(gl.int32)
    else:
        start = batch * schedule.reduced_step
    first, end = split_range(split, length, schedule.splits, schedule.BLOCK)
    return batch, row, split, start, first, end


@gluon.jit
def _load(kept, reduced, schedule, CONSUMERS: gl.constexpr):
    position = 0
    count = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row, _, start, first, end = _tile_at(schedule, index)
        stage, full = acquire(kept, count, CONSUMERS * kept.desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            load_block(kept, batch * kept.step, row + consumer * HALF, full, stage * CONSUMERS + consumer)
        count += 1
        for r in range(first, end, schedule.BLOCK):
            stage, full = acquire(reduced, position, reduced.desc.block_type.nbytes)
            load_block(reduced, start, r, full, stage)
            position += 1


@gluon.jit
def _consume(
    consumer: gl.constexpr, kept, reduced, schedule, results, mask_ptr, mask_strides, stride_split, P,
    CONSUMERS: gl.constexpr, IN_REGISTERS: gl.constexpr, OP: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    BLOCK: gl.constexpr = schedule.BLOCK
    layout: gl.constexpr = zeros(HALF, BLOCK).type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    position = 0
    count = 0
    for tile in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row, split, _, first, end = _tile_at(schedule, tile)
        kept_stage = wait_full(kept, count)
        kept_tile = rows_first(kept, kept_stage * CONSUMERS + consumer)
        if IN_REGISTERS:
            kept_tile = kept_tile.load(gl.DotOperandLayout(0, layout, 2))
            release_after_load(kept.empty.index(kept_stage))
        state = State(
            gl.full([HALF], identity(OP), gl.float32, row_layout), gl.zeros([HALF], gl.float32, row_layout),
            gl.zeros([HALF], gl.int32, row_layout),
        )  # fmt: skip
        for r in range(first, end, BLOCK):
            stage = wait_full(reduced, position)
            reduced_tile = rows_first(reduced, stage).permute((1, 0))
            c = warpgroup_mma(kept_tile, reduced_tile, zeros(HALF, BLOCK), use_acc=False, is_async=True)
            c = warpgroup_mma_wait(0, [c])
            mbarrier.arrive(reduced.empty.index(stage))
            position += 1
            state = reduce_tile(
                c, state, cols + r, batch, end, r + BLOCK > end, mask_ptr, mask_strides, OP,
                results.index_ptr is not None, "hardware",
            )  # fmt: skip
        if not IN_REGISTERS:
            mbarrier.arrive(kept.empty.index(kept_stage))
        count += 1
        row += consumer * HALF
        rows = gl.arange(0, HALF, row_layout)
        at = split.to(gl.int64) * stride_split + batch.to(gl.int64) * P + row + rows
        store_state(state, results, at, rows < P - row, batch, OP, OUTPUT)


@gluon.jit(do_not_specialize=["stride_split", "kept_step", "reduced_step", "P", "R", "tiles", "row_tiles", "splits"])
def _sm90_reduce_kernel(
    kept_desc, reduced_desc, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    counts_ptr, values_ptr, index_ptr, sums_ptr, product_ptr,
    mask_strides, stride_split, kept_step, reduced_step, P, R, tiles, row_tiles, splits,
    BLOCK: gl.constexpr, CONSUMERS: gl.constexpr, KEPT_STAGES: gl.constexpr, STAGES: gl.constexpr,
    KEPT_TRANSPOSED: gl.constexpr, REDUCED_TRANSPOSED: gl.constexpr, OP: gl.constexpr, PARTIAL: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    # The tensors are those of the generic kernel; see ``takes`` for what is None here.
    kept = operand_ring(kept_desc, kept_step, KEPT_TRANSPOSED, KEPT_STAGES, CONSUMERS, CONSUMERS)
    reduced = operand_ring(reduced_desc, reduced_step, REDUCED_TRANSPOSED, STAGES, CONSUMERS)
    schedule = _Schedule(
        tiles=tiles, row_tiles=row_tiles, splits=splits, R=R, reduced_step=reduced_step, lengths_ptr=lengths_ptr,
        offsets_ptr=offsets_ptr, ROWS=HALF * CONSUMERS, BLOCK=BLOCK,
    )  # fmt: skip
    OUTPUT: gl.constexpr = "partial" if PARTIAL else "result"
    fence_async_shared()
    warp_specialize(
        CONSUMERS, _consume,
        (kept, reduced, schedule, Results(values_ptr, index_ptr, sums_ptr, counts_ptr), mask_ptr, mask_strides,
         stride_split, P, CONSUMERS, IN_REGISTERS, OP, OUTPUT),
        _load, (kept, reduced, schedule, CONSUMERS),
    )  # fmt: skip


def takes(operands: ReduceOperands, config: Sm90ReduceConfig) -> tuple[Matrix, Matrix] | None:
    """kept and reduced as TMA sees them, or None if this kernel does not support the call."""
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
    """The launch for the matrices of :func:`takes`.

    Its tensors are those of the operands; then, as in the generic kernel, the divisors of mean, and the results
    ``[Z, P]`` or with several splits their partials ``[splits, Z, P]``: values, indices, and the sums of exponentials
    of a logsumexp's partials; and None, because the product is never stored.
    """
    batch, kept, reduced, _ = operands.sizes()
    kept_matrix, reduced_matrix = matrices
    row_tiles = ceil_div(kept, CONSUMER_ROWS * config.consumers)
    tiles = batch * row_tiles * splits
    return Launch(
        _sm90_reduce_kernel,
        min(tiles, config.programs),
        (strides(operands.mask, 2),),
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
