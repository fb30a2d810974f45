"""Data gradient on Hopper: rows of x and dy stay in shared memory while the producer streams the weights past them.

The gradient of the last bias, the sum of dy over its rows, comes from the same reading of dy.
"""

from typing import Any, NamedTuple

import torch

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import (
    Matrix,
    copy_in,
    copy_out,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...partials import reduce_partials
from ...pipeline import (
    copy_hidden_tile,
    hidden_first,
    init_barriers,
    specialize,
    stage_of,
    start_product,
)
from ...tuning import CONSUMER_ROWS, PipelinedConfig, pipelined_width
from ..operands import Matrices, Operands


@gluon.jit
def _produce(
    x_desc, dy_desc, up_desc, gate_desc, down_desc,
    x_ring, dy_ring, up_ring, gate_ring, down_ring, row_full, row_empty, weight_full, weight_empty,
    up_step, down_step, N, M, tiles, row_tiles,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROW_STAGES: gl.constexpr,
    ROWS: gl.constexpr, UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    GATED: gl.constexpr = gate_desc is not None
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch = tile // row_tiles
        row = batch * M + (tile % row_tiles) * (ROWS * CONSUMERS)
        for consumer in gl.static_range(CONSUMERS):
            row_stage, phase = stage_of(turn, ROW_STAGES)
            index = row_stage * CONSUMERS + consumer
            full = row_full.index(index)
            mbarrier.wait(row_empty.index(index), phase ^ 1)
            mbarrier.expect(full, x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
            copy_in(x_desc, [row + consumer * ROWS, 0], full, x_ring.index(index))
            copy_in(dy_desc, [row + consumer * ROWS, 0], full, dy_ring.index(index))
        turn += 1
        for n in range(0, N, BLOCK_N):
            stage, phase = stage_of(position, STAGES)
            full = weight_full.index(stage)
            mbarrier.wait(weight_empty.index(stage), phase ^ 1)
            if GATED:
                mbarrier.expect(full, 2 * up_desc.block_type.nbytes + down_desc.block_type.nbytes)
                copy_hidden_tile(gate_desc, batch * up_step, n, full, gate_ring.index(stage), UP_TRANSPOSED)
            else:
                mbarrier.expect(full, up_desc.block_type.nbytes + down_desc.block_type.nbytes)
            copy_hidden_tile(up_desc, batch * up_step, n, full, up_ring.index(stage), UP_TRANSPOSED)
            copy_hidden_tile(down_desc, batch * down_step, n, full, down_ring.index(stage), DOWN_TRANSPOSED)
            position += 1


@gluon.jit
def _add_products(
    acc, z, z_gate, d_hidden, up_tile, gate_tile, cols, N,
    EVEN_N: gl.constexpr, UP_TRANSPOSED: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
    ACCURACY: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Starts ``acc + dZ W_up (+ dZg W_gate)``."""
    dtype: gl.constexpr = up_tile.dtype
    _, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
    inside = gl.expand_dims(cols < N, 0)
    if GATED:
        dz = d_hidden * slope
    else:
        dz = through_activation(d_hidden, slope, z, ACTIVATION)
    if not EVEN_N:
        dz = gl.where(inside, dz, 0.0)
    left = gl.convert_layout(dz.to(dtype), layout)
    acc = warpgroup_mma(left, hidden_first(up_tile, UP_TRANSPOSED), acc, is_async=True)
    if GATED:
        dz_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
        if not EVEN_N:
            dz_gate = gl.where(inside, dz_gate, 0.0)
        left = gl.convert_layout(dz_gate.to(dtype), layout)
        acc = warpgroup_mma(left, hidden_first(gate_tile, UP_TRANSPOSED), acc, is_async=True)
    return acc


@gluon.jit
def _consume(
    consumer: gl.constexpr, dx_desc, up_bias_ptr, gate_bias_ptr, dy_sums_ptr,
    x_ring, dy_ring, up_ring, gate_ring, down_ring, row_full, row_empty, weight_full, weight_empty,
    N, M, tiles, row_tiles,
    O: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_O: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, ROWS: gl.constexpr, EVEN_N: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
    ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ring.dtype
    z_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dx_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    dz_layout: gl.constexpr = gl.DotOperandLayout(0, dx_layout, 2)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, z_layout))
    # Each warp adds up a quarter of the columns, each thread eight of them, so that no sum crosses a warp; a read of
    # shared memory takes at least the 8 rows of its swizzling pattern.
    LANES: gl.constexpr = BLOCK_O // 32
    READ_ROWS: gl.constexpr = max(8, 32 // LANES)
    read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 4], [1, 0])
    dy_sums = gl.zeros([READ_ROWS, BLOCK_O], gl.float32, read_layout)
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = (tile // row_tiles) * M + (tile % row_tiles) * (ROWS * CONSUMERS) + consumer * ROWS
        row_stage, phase = stage_of(turn, ROW_STAGES)
        index = row_stage * CONSUMERS + consumer
        mbarrier.wait(row_full.index(index), phase)
        x_tile = x_ring.index(index)
        dy_tile = dy_ring.index(index)
        acc = gl.zeros([ROWS, BLOCK_K], gl.float32, dx_layout)
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(weight_full.index(stage), phase)
        up = hidden_first(up_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
        down = hidden_first(down_ring.index(stage), DOWN_TRANSPOSED).permute((1, 0))
        z_next = start_product(x_tile, up, up_bias_ptr, cols, N, EVEN_N, ROWS, z_layout)
        hidden_next = start_product(dy_tile, down, None, cols, N, EVEN_N, ROWS, z_layout)
        if GATED:
            gate = hidden_first(gate_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
            gate_next = start_product(x_tile, gate, gate_bias_ptr, cols, N, EVEN_N, ROWS, z_layout)
            z, d_hidden, z_gate = warpgroup_mma_wait(0, [z_next, hidden_next, gate_next])
        else:
            z, d_hidden = warpgroup_mma_wait(0, [z_next, hidden_next])
            z_gate = z
        for n in range(BLOCK_N, N, BLOCK_N):
            # Only the last block can reach past N.
            acc_next = _add_products(
                acc, z, z_gate, d_hidden, up_ring.index(stage), gate_ring.index(stage), cols, N,
                True, UP_TRANSPOSED, GATED, ACTIVATION, ACCURACY, dz_layout,
            )  # fmt: skip
            done = stage
            position += 1
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(weight_full.index(stage), phase)
            up = hidden_first(up_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
            down = hidden_first(down_ring.index(stage), DOWN_TRANSPOSED).permute((1, 0))
            z_next = start_product(x_tile, up, up_bias_ptr, cols + n, N, EVEN_N, ROWS, z_layout)
            hidden_next = start_product(dy_tile, down, None, cols + n, N, EVEN_N, ROWS, z_layout)
            if GATED:
                gate = hidden_first(gate_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
                gate_next = start_product(x_tile, gate, gate_bias_ptr, cols + n, N, EVEN_N, ROWS, z_layout)
                acc, z, d_hidden, z_gate = warpgroup_mma_wait(0, [acc_next, z_next, hidden_next, gate_next])
            else:
                acc, z, d_hidden = warpgroup_mma_wait(0, [acc_next, z_next, hidden_next])
                z_gate = z
            mbarrier.arrive(weight_empty.index(done))
        last = (gl.cdiv(N, BLOCK_N) - 1) * BLOCK_N
        acc_next = _add_products(
            acc, z, z_gate, d_hidden, up_ring.index(stage), gate_ring.index(stage), cols + last, N,
            EVEN_N, UP_TRANSPOSED, GATED, ACTIVATION, ACCURACY, dz_layout,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, [acc_next])
        mbarrier.arrive(weight_empty.index(stage))
        position += 1
        turn += 1

        if dy_sums_ptr is not None:
            for first in gl.static_range(0, ROWS, READ_ROWS):
                dy_sums += dy_tile.slice(first, READ_ROWS).load(read_layout).to(gl.float32)
        # x is no longer needed: dx takes its place on the way out.
        x_tile.store((acc * activation_unit(ACTIVATION, ACCURACY)).to(dtype))
        fence_async_shared()
        copy_out(dx_desc, [row, 0], x_tile)
        tma.store_wait(0)
        mbarrier.arrive(row_empty.index(index))
    if dy_sums_ptr is not None:
        part = gl.program_id(0) * CONSUMERS + consumer
        outer = gl.arange(0, BLOCK_O, gl.SliceLayout(0, read_layout))
        gl.store(dy_sums_ptr + part * O + outer, gl.sum(dy_sums, 0), mask=outer < O)


@gluon.jit(do_not_specialize=["up_step", "down_step", "N", "M", "tiles", "row_tiles"])
def _pipelined_data_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, dx_desc, up_bias_ptr, gate_bias_ptr, dy_sums_ptr,
    up_step, down_step, N, M, tiles, row_tiles,
    O: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_O: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, ROW_STAGES: gl.constexpr, ROWS: gl.constexpr, EVEN_N: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = gate_desc is not None
    TURNS: gl.constexpr = CONSUMERS * ROW_STAGES
    x_ring = gl.allocate_shared_memory(dtype, [TURNS, ROWS, BLOCK_K], x_desc.layout)
    dy_ring = gl.allocate_shared_memory(dtype, [TURNS, ROWS, BLOCK_O], dy_desc.layout)
    up_ring = gl.allocate_shared_memory(dtype, [STAGES] + up_desc.block_type.shape, up_desc.layout)
    if GATED:
        gate_ring = gl.allocate_shared_memory(dtype, [STAGES] + up_desc.block_type.shape, up_desc.layout)
    else:
        gate_ring = up_ring
    down_ring = gl.allocate_shared_memory(dtype, [STAGES] + down_desc.block_type.shape, down_desc.layout)
    row_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], barrier)
    row_empty = gl.allocate_shared_memory(gl.int64, [TURNS, 1], barrier)
    weight_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    weight_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(row_full, row_empty, TURNS, 1)
    init_barriers(weight_full, weight_empty, STAGES, CONSUMERS)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (
        dx_desc, up_bias_ptr, gate_bias_ptr, dy_sums_ptr, x_ring, dy_ring, up_ring, gate_ring, down_ring, row_full,
        row_empty, weight_full, weight_empty, N, M, tiles, row_tiles, O, BLOCK_N, BLOCK_K, BLOCK_O, CONSUMERS, STAGES,
        ROW_STAGES, ROWS, EVEN_N, UP_TRANSPOSED, DOWN_TRANSPOSED, GATED, ACTIVATION, ACCURACY,
    ), _produce, (
        x_desc, dy_desc, up_desc, gate_desc, down_desc, x_ring, dy_ring, up_ring, gate_ring, down_ring, row_full,
        row_empty, weight_full, weight_empty, up_step, down_step, N, M, tiles, row_tiles, BLOCK_N, CONSUMERS, STAGES,
        ROW_STAGES, ROWS, UP_TRANSPOSED, DOWN_TRANSPOSED,
    ))  # fmt: skip


class Prepared(NamedTuple):
    """What all executions of one prepared call share: the shapes of dx and of the partial sums of dy, if asked for."""

    shape: tuple[int, ...]
    partials: tuple[int, int] | None
    launch: Launch
    sums: dict[Any, Any]


def prepare_data_gradient(
    operands: Operands, matrices: Matrices, dy: Matrix, column_sums: bool, config: PipelinedConfig
) -> Prepared:
    """The launch for operands that fit: see ``Operands.matrices``."""
    batch, rows, width, hidden, out_width = operands.sizes()
    block, block_k, block_o = config.block, pipelined_width(width), pipelined_width(out_width)
    row_tiles = -(-rows // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles
    programs = min(tiles, config.programs)
    partials = None
    # The widest gated kernel has no registers left for them.
    if column_sums and not (matrices.gate is not None and width > 128):
        partials = (programs * config.consumers, out_width)
    prepared = Launch(
        _pipelined_data_gradient_kernel,
        programs,
        (),
        (matrices.up.step, matrices.down.step, hidden, rows, tiles, row_tiles),
        (
            out_width, block, block_k, block_o, config.consumers, config.stages, config.row_stages, CONSUMER_ROWS,
            hidden % block == 0, matrices.up.transposed, not matrices.down.transposed,
            operands.arithmetic.activation, operands.arithmetic.accuracy,
        ),
        geometries=(
            matrices.x.geometry(CONSUMER_ROWS, block_k),
            dy.geometry(CONSUMER_ROWS, block_o),
            matrices.up.geometry(block, block_k),
            None if matrices.gate is None else matrices.gate.geometry(block, block_k),
            matrices.down.geometry(block_o, block),
            dense(batch * rows, width, CONSUMER_ROWS, block_k),
        ),
    )  # fmt: skip
    return Prepared(tuple(operands.x.shape), partials, prepared, {})


def data_gradient(operands: Operands, dy: torch.Tensor, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx, contiguous, and the sums of dy over all rows where they are prepared."""
    x = operands.x
    dx = x.new_empty(prepared.shape)
    partials = None
    if prepared.partials is not None:
        partials = x.new_empty(prepared.partials, dtype=torch.float32)
    prepared.launch(
        (operands.up_bias, operands.gate_bias, partials), (x, dy, operands.up, operands.gate, operands.down, dx)
    )
    if partials is None:
        return dx, None
    sums = x.new_empty(partials.shape[1])
    reduce_partials(partials, [sums], ready=prepared.sums)
    return dx, sums
