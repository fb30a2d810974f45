"""Weight gradients on Hopper, from what the backward pass has stored: sums over rows of ``leftᵀ right``, in splits.

Those of up and gate are ``dZᵀ x``, that of down is ``dyᵀ H``, and the bias gradients are the sums of the left sides,
one more product, with a matrix of ones. All of them are computed in one launch, so that together they fill the device.
One producer warp copies both sides; two consumers hold the sums of 64 of left's columns each.
"""

import torch

from ...activations import activation_unit
from ...hopper import (
    Matrix,
    copy_in,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...pipeline import init_barriers, specialize, stage_of
from ...tuning import CONSUMER_ROWS, StoredConfig
from ..operands import Matrices, Operands


@gluon.jit
def _produce(
    stored_desc, x_desc, dy_desc, hidden_desc, left_ring, right_ring, full, empty,
    is_down, part, unit, column, part_columns, first_row, end_row,
    PROJECTIONS: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # Stored are dZ, dZg (gated only) and H, each ``part_columns`` wide.
    left_column = part * part_columns + unit
    hidden_column = PROJECTIONS * part_columns + column
    position = 0
    for row in range(first_row, end_row, ROWS):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), CONSUMERS * stored_desc.block_type.nbytes + x_desc.block_type.nbytes)
        if is_down:
            for consumer in gl.static_range(CONSUMERS):
                tile = left_ring.index(stage * CONSUMERS + consumer)
                copy_in(dy_desc, [row, unit + consumer * UNITS], full.index(stage), tile)
            copy_in(hidden_desc, [row, hidden_column], full.index(stage), right_ring.index(stage))
        else:
            for consumer in gl.static_range(CONSUMERS):
                tile = left_ring.index(stage * CONSUMERS + consumer)
                copy_in(stored_desc, [row, left_column + consumer * UNITS], full.index(stage), tile)
            copy_in(x_desc, [row, column], full.index(stage), right_ring.index(stage))
        position += 1


@gluon.jit
def _store(ptr, sums_ptr, acc, sums, unit, column, units, width):
    """One consumer's tile of a gradient ``[units, width]``, and of the sums."""
    rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    inside = gl.expand_dims(rows < units - unit, 1) & gl.expand_dims(columns < width - column, 0)
    offsets = gl.expand_dims(rows * width, 1) + gl.expand_dims(columns, 0)
    target = ptr + (unit.to(gl.int64) * width + column)
    gl.store(target + offsets, acc.to(ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        # Each of the columns has the same sum; the other programs of these units store it too.
        total = gl.max(sums, 1)
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        gl.store(sums_ptr + unit + rows, total.to(sums_ptr.dtype.element_ty), mask=rows < units - unit)


@gluon.jit
def _consume(
    consumer: gl.constexpr, up_ptr, gate_ptr, down_ptr, up_sums_ptr, gate_sums_ptr, dy_sums_ptr,
    left_ring, right_ring, ones, full, empty, is_down, part, unit, column, first_row, end_row,
    N, K: gl.constexpr, O: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    SUMS: gl.constexpr = (up_sums_ptr is not None) or (gate_sums_ptr is not None) or (dy_sums_ptr is not None)
    acc = gl.zeros([UNITS, COLUMNS], gl.float32, layout)
    sums = gl.zeros([UNITS, 8], gl.float32, sums_layout)
    position = 0
    for _ in range(first_row, end_row, ROWS):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(full.index(stage), phase)
        left = left_ring.index(stage * CONSUMERS + consumer).permute((1, 0))
        acc = warpgroup_mma(left, right_ring.index(stage), acc, is_async=True)
        if SUMS:
            sums = warpgroup_mma(left, ones.permute((1, 0)), sums, is_async=True)
            acc, sums = warpgroup_mma_wait(2, [acc, sums])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        if position > 0:
            mbarrier.arrive(empty.index((position - 1) % STAGES))
        position += 1
    acc, sums = warpgroup_mma_wait(0, [acc, sums])
    acc *= activation_unit(ACTIVATION, ACCURACY)
    unit += consumer * UNITS
    if is_down:
        _store(down_ptr, dy_sums_ptr, acc, sums, unit, column, O, N)
    else:
        sums *= activation_unit(ACTIVATION, ACCURACY)
        if part == 0:
            _store(up_ptr, up_sums_ptr, acc, sums, unit, column, N, K)
        elif gate_ptr is not None:
            _store(gate_ptr, gate_sums_ptr, acc, sums, unit, column, N, K)


@gluon.jit(do_not_specialize=["part_columns", "M", "splits"])
def _stored_weight_gradient_kernel(
    stored_desc, x_desc, dy_desc, hidden_desc,
    up_ptr, gate_ptr, down_ptr, up_sums_ptr, gate_sums_ptr, dy_sums_ptr, stride_split, N, part_columns, M, splits,
    K: gl.constexpr, O: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    # Gradients are dense, and there once per split.
    dtype: gl.constexpr = stored_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    PROJECTIONS: gl.constexpr = 1 if gate_ptr is None else 2
    split = gl.program_id(0) % splits
    tile = gl.program_id(0) // splits
    column_tiles = gl.cdiv(K, COLUMNS)
    part_tiles = gl.cdiv(N, UNITS * CONSUMERS) * column_tiles
    part = gl.minimum(tile // part_tiles, PROJECTIONS)
    tile -= part * part_tiles
    is_down = part == PROJECTIONS
    if is_down:
        column_tiles = gl.cdiv(N, COLUMNS)
    unit = tile // column_tiles * (UNITS * CONSUMERS)
    column = tile % column_tiles * COLUMNS
    split_rows = gl.cdiv(gl.cdiv(M, ROWS), splits) * ROWS
    first_row = split * split_rows
    end_row = gl.minimum(first_row + split_rows, M)
    partial = split.to(gl.int64) * stride_split
    up_ptr += partial
    down_ptr += partial
    if gate_ptr is not None:
        gate_ptr += partial
    if up_sums_ptr is not None:
        up_sums_ptr += partial
    if gate_sums_ptr is not None:
        gate_sums_ptr += partial
    if dy_sums_ptr is not None:
        dy_sums_ptr += partial
    left_ring = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, UNITS], stored_desc.layout)
    right_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], x_desc.layout)
    ones = gl.allocate_shared_memory(dtype, [8, ROWS], gl.NVMMASharedLayout.get_default_for([8, ROWS], dtype))
    ones.store(gl.full([8, ROWS], 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(full, empty, STAGES, CONSUMERS)
    fence_async_shared()
    specialize(2, _consume, (
        up_ptr, gate_ptr, down_ptr, up_sums_ptr, gate_sums_ptr, dy_sums_ptr, left_ring, right_ring, ones, full, empty,
        is_down, part, unit, column, first_row, end_row, N, K, O, COLUMNS, ROWS, UNITS, CONSUMERS, STAGES, ACTIVATION,
        ACCURACY,
    ), _produce, (
        stored_desc, x_desc, dy_desc, hidden_desc, left_ring, right_ring, full, empty, is_down, part, unit, column,
        part_columns, first_row, end_row, PROJECTIONS, ROWS, UNITS, CONSUMERS, STAGES,
    ))  # fmt: skip


def prepare_stored_weight_gradients(
    operands: Operands,
    matrices: Matrices,
    dy: Matrix,
    shape: tuple[int, int, int],
    split_size: int,
    splits: int,
    config: StoredConfig,
) -> Launch:
    """The launch, for what :func:`hidden_gradient` returns in this shape."""
    _, _, width, hidden, out_width = operands.sizes()
    rows, parts, part_columns = shape
    columns = parts * part_columns
    return Launch(
        _stored_weight_gradient_kernel,
        config.weight_tiles(parts - 1, width, hidden, out_width) * splits,
        (split_size, hidden),
        (part_columns, rows, splits),
        (
            width, out_width, config.block_columns, config.rows, CONSUMER_ROWS, config.consumers, config.stages,
            operands.arithmetic.activation, operands.arithmetic.accuracy,
        ),
        geometries=(
            dense(rows, columns, config.rows, CONSUMER_ROWS),
            matrices.x.geometry(config.rows, config.block_columns),
            dy.geometry(config.rows, CONSUMER_ROWS),
            dense(rows, columns, config.rows, config.block_columns),
        ),
    )  # fmt: skip


def launch_stored_weight_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    stored: torch.Tensor,
    targets: list[torch.Tensor | None],
    prepared: Launch,
) -> None:
    """Fills ``targets``, gradients or the first split's partials: up, gate, down, up_bias, gate_bias, down_bias.

    All matrices are computed, biases only if asked for.
    """
    prepared(tuple(targets), (stored, x, dy, stored))
