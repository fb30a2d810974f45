"""Weight gradients on Hopper: each consumer keeps 64 hidden units' weights and sums while rows of x and dy stream past.

Everything hidden is kept transposed, ``[hidden units, rows]``: it is the left operand of each gradient's product.
"""

from typing import Any

import torch

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import Matrix, copy_in, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from ...launching import Launch
from ...pipeline import copy_hidden_tile, hidden_first, init_barriers, specialize, stage_of
from ...tuning import CONSUMER_ROWS, PipelinedConfig, pipelined_width
from ..operands import Matrices, Operands


@gluon.jit
def _produce(
    x_desc, dy_desc, up_desc, gate_desc, down_desc,
    x_ring, dy_ring, up_tiles, gate_tiles, down_tiles, row_full, row_empty, weight_full,
    batch, first_unit, first_row, end_row, up_step, down_step, M,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    GATED: gl.constexpr = gate_desc is not None
    for consumer in gl.static_range(CONSUMERS):
        n = first_unit + consumer * UNITS
        full = weight_full.index(consumer)
        if GATED:
            mbarrier.expect(full, 2 * up_desc.block_type.nbytes + down_desc.block_type.nbytes)
            copy_hidden_tile(gate_desc, batch * up_step, n, full, gate_tiles.index(consumer), UP_TRANSPOSED)
        else:
            mbarrier.expect(full, up_desc.block_type.nbytes + down_desc.block_type.nbytes)
        copy_hidden_tile(up_desc, batch * up_step, n, full, up_tiles.index(consumer), UP_TRANSPOSED)
        copy_hidden_tile(down_desc, batch * down_step, n, full, down_tiles.index(consumer), DOWN_TRANSPOSED)
    position = 0
    for row in range(first_row, end_row, BLOCK_M):
        stage, phase = stage_of(position, STAGES)
        full = row_full.index(stage)
        mbarrier.wait(row_empty.index(stage), phase ^ 1)
        mbarrier.expect(full, x_desc.block_type.nbytes + dy_desc.block_type.nbytes)
        copy_in(x_desc, [batch * M + row, 0], full, x_ring.index(stage))
        copy_in(dy_desc, [batch * M + row, 0], full, dy_ring.index(stage))
        position += 1


@gluon.jit
def _unit_bias(bias_ptr, units, N):
    return gl.expand_dims(gl.load(bias_ptr + units, mask=units < N, other=0.0).to(gl.float32), 1)


@gluon.jit
def _store_matrix(ptr, sums, units, inner, WIDTH: gl.constexpr, N, UNITS_FIRST: gl.constexpr):
    """Stores sums, the hidden units first, into a dense ``[N, WIDTH]`` matrix, or a ``[WIDTH, N]`` one."""
    rows, columns = gl.expand_dims(units.to(gl.int64), 1), gl.expand_dims(inner.to(gl.int64), 0)
    if UNITS_FIRST:
        offsets = rows * WIDTH + columns
    else:
        offsets = rows + columns * N
    inside = gl.expand_dims(units < N, 1) & gl.expand_dims(inner < WIDTH, 0)
    gl.store(ptr + offsets, sums.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consume(
    consumer: gl.constexpr, up_bias_ptr, gate_bias_ptr, d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr,
    d_gate_bias_ptr, x_ring, dy_ring, up_tiles, gate_tiles, down_tiles, row_full, row_empty, weight_full,
    first_unit, first_row, end_row, N, M,
    K: gl.constexpr, O: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_O: gl.constexpr,
    STAGES: gl.constexpr, UNITS: gl.constexpr, EVEN_M: gl.constexpr, UP_TRANSPOSED: gl.constexpr,
    DOWN_TRANSPOSED: gl.constexpr, GRADIENTS_TRANSPOSED: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
    ACCURACY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ring.dtype
    z_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    up_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    down_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_O, 16])
    dz_layout: gl.constexpr = gl.DotOperandLayout(0, up_layout, 2)
    hidden_layout: gl.constexpr = gl.DotOperandLayout(0, down_layout, 2)
    UP: gl.constexpr = (d_up_ptr is not None) or (d_up_bias_ptr is not None)
    GATE: gl.constexpr = (d_gate_ptr is not None) or (d_gate_bias_ptr is not None)
    units = first_unit + consumer * UNITS + gl.arange(0, UNITS, gl.SliceLayout(1, z_layout))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, z_layout))
    mbarrier.wait(weight_full.index(consumer), 0)
    up = hidden_first(up_tiles.index(consumer), UP_TRANSPOSED)
    gate = hidden_first(gate_tiles.index(consumer), UP_TRANSPOSED)
    down = hidden_first(down_tiles.index(consumer), DOWN_TRANSPOSED)
    if up_bias_ptr is not None:
        up_bias = _unit_bias(up_bias_ptr, units, N)
    if gate_bias_ptr is not None:
        gate_bias = _unit_bias(gate_bias_ptr, units, N)
    d_up = gl.zeros([UNITS, BLOCK_K], gl.float32, up_layout)
    d_gate = gl.zeros([UNITS, BLOCK_K], gl.float32, up_layout)
    d_down = gl.zeros([UNITS, BLOCK_O], gl.float32, down_layout)
    d_up_bias = gl.zeros([UNITS], gl.float32, gl.SliceLayout(1, z_layout))
    d_gate_bias = gl.zeros([UNITS], gl.float32, gl.SliceLayout(1, z_layout))
    position = 0
    for row in range(first_row, end_row, BLOCK_M):
        stage, phase = stage_of(position, STAGES)
        mbarrier.wait(row_full.index(stage), phase)
        x_tile = x_ring.index(stage)
        dy_tile = dy_ring.index(stage)
        zero = gl.zeros([UNITS, BLOCK_M], gl.float32, z_layout)
        # The sums of the pre-activations begin with the bias, so that adding it costs nothing.
        z_start = zero
        if up_bias_ptr is not None:
            z_start = up_bias + zero
        z = warpgroup_mma(up, x_tile.permute((1, 0)), z_start, use_acc=up_bias_ptr is not None, is_async=True)
        if GATED:
            gate_start = zero
            if gate_bias_ptr is not None:
                gate_start = gate_bias + zero
            z_gate = warpgroup_mma(
                gate, x_tile.permute((1, 0)), gate_start, use_acc=gate_bias_ptr is not None, is_async=True
            )
        # Each product is waited for where its result is needed, so that the next ones run beside the arithmetic.
        PENDING: gl.constexpr = 1 if UP or GATE else 0
        if UP or GATE:
            d_hidden_next = warpgroup_mma(down, dy_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        z = warpgroup_mma_wait(PENDING, [z])
        if GATED:
            z_gate = warpgroup_mma_wait(PENDING, [z_gate])
        else:
            z_gate = z
        hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
        inside = gl.expand_dims(row + rows < M, 0)
        if d_down_ptr is not None:
            if not EVEN_M:
                # Past M, x and dy load as 0, but 0 times an infinite weight or bias is NaN.
                hidden = gl.where(inside, hidden, 0.0)
            left = gl.convert_layout(hidden.to(dtype), hidden_layout)
            d_down_next = warpgroup_mma(left, dy_tile, d_down, is_async=True)
        if UP or GATE:
            d_hidden = warpgroup_mma_wait(1 if d_down_ptr is not None else 0, [d_hidden_next])
        if UP:
            if GATED:
                dz = d_hidden * slope
            else:
                dz = through_activation(d_hidden, slope, z, ACTIVATION)
            if not EVEN_M:
                dz = gl.where(inside, dz, 0.0)
            if d_up_bias_ptr is not None:
                d_up_bias += gl.sum(dz, 1)
            if d_up_ptr is not None:
                left = gl.convert_layout(dz.to(dtype), dz_layout)
                d_up_next = warpgroup_mma(left, x_tile, d_up, is_async=True)
        if GATE:
            dz_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
            if not EVEN_M:
                dz_gate = gl.where(inside, dz_gate, 0.0)
            if d_gate_bias_ptr is not None:
                d_gate_bias += gl.sum(dz_gate, 1)
            if d_gate_ptr is not None:
                left = gl.convert_layout(dz_gate.to(dtype), dz_layout)
                d_gate_next = warpgroup_mma(left, x_tile, d_gate, is_async=True)
        if d_down_ptr is not None:
            d_down = warpgroup_mma_wait(0, [d_down_next])
        if d_up_ptr is not None:
            d_up = warpgroup_mma_wait(0, [d_up_next])
        if d_gate_ptr is not None:
            d_gate = warpgroup_mma_wait(0, [d_gate_next])
        mbarrier.arrive(row_empty.index(stage))
        position += 1

    scale = activation_unit(ACTIVATION, ACCURACY)
    up_units = first_unit + consumer * UNITS + gl.arange(0, UNITS, gl.SliceLayout(1, up_layout))
    down_units = first_unit + consumer * UNITS + gl.arange(0, UNITS, gl.SliceLayout(1, down_layout))
    inner = gl.arange(0, BLOCK_K, gl.SliceLayout(0, up_layout))
    outer = gl.arange(0, BLOCK_O, gl.SliceLayout(0, down_layout))
    if d_up_ptr is not None:
        _store_matrix(d_up_ptr, d_up * scale, up_units, inner, K, N, not GRADIENTS_TRANSPOSED)
    if d_gate_ptr is not None:
        _store_matrix(d_gate_ptr, d_gate * scale, up_units, inner, K, N, not GRADIENTS_TRANSPOSED)
    if d_down_ptr is not None:
        _store_matrix(d_down_ptr, d_down * scale, down_units, outer, O, N, GRADIENTS_TRANSPOSED)
    if d_up_bias_ptr is not None:
        gl.store(d_up_bias_ptr + units, (d_up_bias * scale).to(d_up_bias_ptr.dtype.element_ty), mask=units < N)
    if d_gate_bias_ptr is not None:
        gl.store(d_gate_bias_ptr + units, (d_gate_bias * scale).to(d_gate_bias_ptr.dtype.element_ty), mask=units < N)


@gluon.jit(do_not_specialize=["stride_split", "up_step", "down_step", "N", "M", "splits"])
def _pipelined_weight_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr,
    d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr,
    stride_split, up_step, down_step, N, M, splits,
    K: gl.constexpr, O: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_O: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr, EVEN_M: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, GRADIENTS_TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    # Gradients are dense, one batch entry behind the other, and there once per split.
    dtype: gl.constexpr = x_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    GATED: gl.constexpr = gate_desc is not None
    program = gl.program_id(0)
    unit_tiles = gl.cdiv(N, UNITS * CONSUMERS)
    split = program % splits
    batch = program // splits // unit_tiles
    first_unit = (program // splits % unit_tiles) * (UNITS * CONSUMERS)
    split_rows = gl.cdiv(gl.cdiv(M, BLOCK_M), splits) * BLOCK_M
    first_row = split * split_rows
    end_row = gl.minimum(first_row + split_rows, M)
    entry = batch.to(gl.int64) * N
    partial = split.to(gl.int64) * stride_split
    if d_up_ptr is not None:
        d_up_ptr += partial + entry * K
    if d_gate_ptr is not None:
        d_gate_ptr += partial + entry * K
    if d_down_ptr is not None:
        d_down_ptr += partial + entry * O
    if d_up_bias_ptr is not None:
        d_up_bias_ptr += partial + entry
    if d_gate_bias_ptr is not None:
        d_gate_bias_ptr += partial + entry
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    dy_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_O], dy_desc.layout)
    up_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + up_desc.block_type.shape, up_desc.layout)
    if GATED:
        gate_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + up_desc.block_type.shape, up_desc.layout)
    else:
        gate_tiles = up_tiles
    down_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS] + down_desc.block_type.shape, down_desc.layout)
    row_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    row_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    weight_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    init_barriers(row_full, row_empty, STAGES, CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(weight_full.index(consumer), count=1)
    fence_async_shared()
    specialize(CONSUMERS, _consume, (
        up_bias_ptr, gate_bias_ptr, d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr, x_ring, dy_ring,
        up_tiles, gate_tiles, down_tiles, row_full, row_empty, weight_full, first_unit, first_row, end_row, N, M, K, O,
        BLOCK_M, BLOCK_K, BLOCK_O, STAGES, UNITS, EVEN_M, UP_TRANSPOSED, DOWN_TRANSPOSED, GRADIENTS_TRANSPOSED, GATED,
        ACTIVATION, ACCURACY,
    ), _produce, (
        x_desc, dy_desc, up_desc, gate_desc, down_desc, x_ring, dy_ring, up_tiles, gate_tiles, down_tiles, row_full,
        row_empty, weight_full, batch, first_unit, first_row, end_row, up_step, down_step, M, BLOCK_M, CONSUMERS,
        STAGES, UNITS, UP_TRANSPOSED, DOWN_TRANSPOSED,
    ))  # fmt: skip


def prepare_weight_gradient(
    operands: Operands,
    matrices: Matrices,
    dy: Matrix,
    split_size: int,
    transposed: bool,
    splits: int,
    config: PipelinedConfig,
) -> Launch:
    """The launch of one pass over x and dy.

    ``transposed`` gradients have the layout of a batched GEMM-GEMM's operands.
    """
    batch, rows, width, hidden, out_width = operands.sizes()
    block_k, block_o = pipelined_width(width), pipelined_width(out_width)
    even = rows % config.block == 0 and (splits > 1 or batch > 1)
    constants: tuple[Any, ...] = (
        width, out_width, config.block, block_k, block_o, config.consumers, config.stages, CONSUMER_ROWS, even,
        matrices.up.transposed, not matrices.down.transposed, transposed,
        operands.arithmetic.activation, operands.arithmetic.accuracy,
    )  # fmt: skip
    return Launch(
        _pipelined_weight_gradient_kernel,
        batch * -(-hidden // (CONSUMER_ROWS * config.consumers)) * splits,
        (),
        (split_size, matrices.up.step, matrices.down.step, hidden, rows, splits),
        constants,
        geometries=(
            matrices.x.geometry(config.block, block_k),
            dy.geometry(config.block, block_o),
            matrices.up.geometry(CONSUMER_ROWS, block_k),
            None if matrices.gate is None else matrices.gate.geometry(CONSUMER_ROWS, block_k),
            matrices.down.geometry(block_o, CONSUMER_ROWS),
        ),
    )


def launch_weight_gradient(
    operands: Operands, dy: torch.Tensor, targets: list[torch.Tensor | None], prepared: Launch
) -> None:
    """Fills ``targets``: gradients or the first split's partials, in the order of ``WeightGradients``."""
    prepared(
        (operands.up_bias, operands.gate_bias, *targets), (operands.x, dy, operands.up, operands.gate, operands.down)
    )
