"""Forward on Hopper: consumers keep their rows of x in registers while the producer streams the weights past them."""

import torch

from ...activations import activation_unit, hidden_and_slopes
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
from ...pipeline import (
    copy_hidden_tile,
    hidden_first,
    init_barriers,
    release_after_load,
    specialize,
    stage_of,
    start_product,
)
from ...tuning import CONSUMER_ROWS, WIDEST_X_IN_REGISTERS, PipelinedConfig, pipelined_width
from ..operands import Matrices, Operands


@gluon.jit
def _produce(
    x_desc, up_desc, gate_desc, down_desc,
    x_tiles, up_ring, gate_ring, down_ring, x_full, x_empty, up_full, up_empty, down_full, down_empty,
    up_step, down_step, N, M, tiles, row_tiles,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    GATED: gl.constexpr = gate_desc is not None
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch = tile // row_tiles
        row = batch * M + (tile % row_tiles) * (ROWS * CONSUMERS)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(x_empty.index(consumer), (turn & 1) ^ 1)
            mbarrier.expect(x_full.index(consumer), x_desc.block_type.nbytes)
            copy_in(x_desc, [row + consumer * ROWS, 0], x_full.index(consumer), x_tiles.index(consumer))
        turn += 1
        for n in range(0, N, BLOCK_N):
            stage, phase = stage_of(position, STAGES)
            full = up_full.index(stage)
            mbarrier.wait(up_empty.index(stage), phase ^ 1)
            if GATED:
                mbarrier.expect(full, 2 * up_desc.block_type.nbytes)
                copy_hidden_tile(gate_desc, batch * up_step, n, full, gate_ring.index(stage), UP_TRANSPOSED)
            else:
                mbarrier.expect(full, up_desc.block_type.nbytes)
            copy_hidden_tile(up_desc, batch * up_step, n, full, up_ring.index(stage), UP_TRANSPOSED)
            full = down_full.index(stage)
            mbarrier.wait(down_empty.index(stage), phase ^ 1)
            mbarrier.expect(full, down_desc.block_type.nbytes)
            copy_hidden_tile(down_desc, batch * down_step, n, full, down_ring.index(stage), DOWN_TRANSPOSED)
            position += 1


@gluon.jit
def _hidden(z, z_gate, cols, N, GATED: gl.constexpr, EVEN_N: gl.constexpr, ACTIVATION: gl.constexpr,
            ACCURACY: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    hidden, _, _ = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
    if not EVEN_N:
        # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
        hidden = gl.where(gl.expand_dims(cols < N, 0), hidden, 0.0)
    return gl.convert_layout(hidden.to(dtype), layout)


@gluon.jit
def _consume(
    consumer: gl.constexpr, y_desc, up_bias_ptr, gate_bias_ptr, down_bias_ptr, residual_ptr,
    x_tiles, y_tiles, up_ring, gate_ring, down_ring, x_full, x_empty, up_full, up_empty, down_full, down_empty,
    stride_rm, N, M, tiles, row_tiles,
    O: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_O: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, EVEN_N: gl.constexpr, UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr,
    GATED: gl.constexpr, X_IN_REGISTERS: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_tiles.dtype
    z_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    y_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_O, 16])
    x_layout: gl.constexpr = gl.DotOperandLayout(0, z_layout, 2)
    hidden_layout: gl.constexpr = gl.DotOperandLayout(0, y_layout, 2)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, z_layout))
    outer = gl.arange(0, BLOCK_O, gl.SliceLayout(0, y_layout))
    position = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch = tile // row_tiles
        row_in_batch = (tile % row_tiles) * (ROWS * CONSUMERS) + consumer * ROWS
        mbarrier.wait(x_full.index(consumer), turn & 1)
        if X_IN_REGISTERS:
            x_tile = x_tiles.index(consumer).load(x_layout)
            release_after_load(x_empty.index(consumer))
        else:
            x_tile = x_tiles.index(consumer)
        acc = gl.zeros([ROWS, BLOCK_O], gl.float32, y_layout)
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(up_full.index(stage), phase)
        up = hidden_first(up_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
        z_next = start_product(x_tile, up, up_bias_ptr, cols, N, EVEN_N, ROWS, z_layout)
        if GATED:
            gate = hidden_first(gate_ring.index(stage), UP_TRANSPOSED).permute((1, 0))
            gate_next = start_product(x_tile, gate, gate_bias_ptr, cols, N, EVEN_N, ROWS, z_layout)
            z, z_gate = warpgroup_mma_wait(0, [z_next, gate_next])
        else:
            z = warpgroup_mma_wait(0, [z_next])
            z_gate = z
        mbarrier.arrive(up_empty.index(stage))
        for n in range(BLOCK_N, N, BLOCK_N):
            # Only the last block can reach past N.
            hidden = _hidden(z, z_gate, cols, N, GATED, True, ACTIVATION, ACCURACY, dtype, hidden_layout)
            stage, phase = stage_of(position, STAGES)
            mbarrier.wait(down_full.index(stage), phase)
            down = hidden_first(down_ring.index(stage), DOWN_TRANSPOSED)
            acc_next = warpgroup_mma(hidden, down, acc, is_async=True)
            # The next pre-activations are under way together with this tile's share of y.
            position += 1
            next_stage, next_phase = stage_of(position, STAGES)
            mbarrier.wait(up_full.index(next_stage), next_phase)
            up = hidden_first(up_ring.index(next_stage), UP_TRANSPOSED).permute((1, 0))
            z_next = start_product(x_tile, up, up_bias_ptr, cols + n, N, EVEN_N, ROWS, z_layout)
            if GATED:
                gate = hidden_first(gate_ring.index(next_stage), UP_TRANSPOSED).permute((1, 0))
                gate_next = start_product(x_tile, gate, gate_bias_ptr, cols + n, N, EVEN_N, ROWS, z_layout)
                acc, z, z_gate = warpgroup_mma_wait(0, [acc_next, z_next, gate_next])
            else:
                acc, z = warpgroup_mma_wait(0, [acc_next, z_next])
                z_gate = z
            mbarrier.arrive(down_empty.index(stage))
            mbarrier.arrive(up_empty.index(next_stage))
        last = (gl.cdiv(N, BLOCK_N) - 1) * BLOCK_N
        hidden = _hidden(z, z_gate, cols + last, N, GATED, EVEN_N, ACTIVATION, ACCURACY, dtype, hidden_layout)
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(down_full.index(stage), phase)
        down = hidden_first(down_ring.index(stage), DOWN_TRANSPOSED)
        acc = warpgroup_mma_wait(0, [warpgroup_mma(hidden, down, acc, is_async=True)])
        mbarrier.arrive(down_empty.index(stage))
        position += 1
        turn += 1

        y = acc * activation_unit(ACTIVATION, ACCURACY)
        if down_bias_ptr is not None:
            y += gl.expand_dims(gl.load(down_bias_ptr + outer, mask=outer < O, other=0.0).to(gl.float32), 0)
        if residual_ptr is not None:
            rows = row_in_batch + gl.arange(0, ROWS, gl.SliceLayout(1, y_layout))
            offsets = gl.expand_dims((batch * M + rows).to(gl.int64) * stride_rm, 1) + gl.expand_dims(outer, 0)
            inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(outer < O, 0)
            y += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
        if X_IN_REGISTERS:
            # The tile of y may still be on its way out from the turn before.
            tma.store_wait(0)
            y_tile = y_tiles.index(consumer)
        else:
            y_tile = x_tiles.index(consumer)
        y_tile.store(y.to(dtype))
        fence_async_shared()
        copy_out(y_desc, [batch * M + row_in_batch, 0], y_tile)
        if not X_IN_REGISTERS:
            tma.store_wait(0)
            mbarrier.arrive(x_empty.index(consumer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["up_step", "down_step", "N", "M", "tiles", "row_tiles"])
def _pipelined_forward_kernel(
    x_desc, up_desc, gate_desc, down_desc, y_desc, up_bias_ptr, gate_bias_ptr, down_bias_ptr, residual_ptr,
    stride_rm, up_step, down_step, N, M, tiles, row_tiles,
    O: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_O: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, EVEN_N: gl.constexpr, UP_TRANSPOSED: gl.constexpr,
    DOWN_TRANSPOSED: gl.constexpr, X_IN_REGISTERS: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = gate_desc is not None
    x_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_K], x_desc.layout)
    if X_IN_REGISTERS:
        y_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_O], y_desc.layout)
    else:
        y_tiles = x_tiles
    up_ring = gl.allocate_shared_memory(dtype, [STAGES] + up_desc.block_type.shape, up_desc.layout)
    if GATED:
        gate_ring = gl.allocate_shared_memory(dtype, [STAGES] + up_desc.block_type.shape, up_desc.layout)
    else:
        gate_ring = up_ring
    down_ring = gl.allocate_shared_memory(dtype, [STAGES] + down_desc.block_type.shape, down_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    x_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    up_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    up_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    down_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    down_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    init_barriers(x_full, x_empty, CONSUMERS, 1)
    init_barriers(up_full, up_empty, STAGES, CONSUMERS)
    init_barriers(down_full, down_empty, STAGES, CONSUMERS)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (
        y_desc, up_bias_ptr, gate_bias_ptr, down_bias_ptr, residual_ptr, x_tiles, y_tiles, up_ring, gate_ring,
        down_ring, x_full, x_empty, up_full, up_empty, down_full, down_empty, stride_rm, N, M, tiles, row_tiles, O,
        BLOCK_N, BLOCK_O, CONSUMERS, STAGES, ROWS, EVEN_N, UP_TRANSPOSED, DOWN_TRANSPOSED, GATED, X_IN_REGISTERS,
        ACTIVATION, ACCURACY,
    ), _produce, (
        x_desc, up_desc, gate_desc, down_desc, x_tiles, up_ring, gate_ring, down_ring, x_full, x_empty, up_full,
        up_empty, down_full, down_empty, up_step, down_step, N, M, tiles, row_tiles, BLOCK_N, CONSUMERS, STAGES, ROWS,
        UP_TRANSPOSED, DOWN_TRANSPOSED,
    ))  # fmt: skip


def prepare_forward(operands: Operands, matrices: Matrices, residual: Matrix | None, config: PipelinedConfig) -> Launch:
    """The launch for operands that fit: see ``Operands.matrices``."""
    batch, rows, width, hidden, out_width = operands.sizes()
    block, block_k, block_o = config.block, pipelined_width(width), pipelined_width(out_width)
    row_tiles = -(-rows // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles
    return Launch(
        _pipelined_forward_kernel,
        min(tiles, config.programs),
        (0 if residual is None else residual.row_stride,),
        (matrices.up.step, matrices.down.step, hidden, rows, tiles, row_tiles),
        (
            out_width, block, block_k, block_o, config.consumers, config.stages, CONSUMER_ROWS, hidden % block == 0,
            matrices.up.transposed, not matrices.down.transposed, width <= WIDEST_X_IN_REGISTERS,
            operands.arithmetic.activation, operands.arithmetic.accuracy,
        ),
        geometries=(
            matrices.x.geometry(CONSUMER_ROWS, block_k),
            matrices.up.geometry(block, block_k),
            None if matrices.gate is None else matrices.gate.geometry(block, block_k),
            matrices.down.geometry(block_o, block),
            dense(batch * rows, out_width, CONSUMER_ROWS, block_o),
        ),
    )  # fmt: skip


def forward(
    operands: Operands,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
    prepared: Launch,
) -> torch.Tensor:
    """y of this shape, contiguous, by the launch that :func:`prepare_forward` has prepared."""
    x = operands.x
    y = x.new_empty(shape)
    prepared(
        (operands.up_bias, operands.gate_bias, down_bias, residual), (x, operands.up, operands.gate, operands.down, y)
    )
    return y
