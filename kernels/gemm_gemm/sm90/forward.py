"""Forward on Hopper: consumers keep their rows of x in registers while the load warp streams the weights past them."""

from typing import Any

import torch

from ...activations import activation_unit, hidden_and_slopes
from ...hopper import (
    Matrix,
    copy_out,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    resources,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...launching import Launch
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import rows_first
from ...matmul.sm90.ring import HALF, release_after_load, wait_full
from ...matmul.sm90.roles import specialize
from ...matmul.sm90.schedules import RowSchedule, rows_at
from ...tiles import only_before
from ...tuning import CONSUMER_ROWS, WIDEST_X_IN_REGISTERS, Sm90Config, sm90_width
from ..operands import Matrices, Operands
from .mainloop import (
    geometries,
    last_constants,
    left_operand,
    load_tiles,
    make_products,
    multiply_twice,
    row_stage,
    start_pre_activations,
)


@resources
class _Output:
    """What y is made of besides the products; it leaves through ``tiles`` where x is in registers, else through x's."""

    y: Any
    tiles: Any
    bias_ptr: Any
    residual_ptr: Any
    stride_rm: Any
    O: Any


@gluon.jit
def _pre_activations(acc, x_tile, stage, n, products):
    """z and z_gate of the hidden units from ``n`` on."""
    z = start_pre_activations(x_tile, products.up, products.up_bias_ptr, stage, n, products)
    if products.gate is not None:
        z_gate = start_pre_activations(x_tile, products.gate, products.gate_bias_ptr, stage, n, products)
        acc, z, z_gate = warpgroup_mma_wait(0, [acc, z, z_gate])
    else:
        acc, z = warpgroup_mma_wait(0, [acc, z])
        z_gate = z
    return acc, (z, z_gate)


@gluon.jit
def _add_share(acc, block, n, position, products, EVEN_N: gl.constexpr):
    """Starts ``acc + H W_downᵀ``, of the hidden units from ``n`` on."""
    z, z_gate = block
    values, _, _ = hidden_and_slopes(z, z_gate, products.gate is not None, products.ACTIVATION, products.ACCURACY)
    # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
    units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, z.type.layout))
    left = left_operand(only_before(values, units, products.N, EVEN_N), acc.shape[1], products.x.desc.dtype)
    return warpgroup_mma(left, rows_first(products.down, wait_full(products.down, position)), acc, is_async=True)


@gluon.jit
def _epilogue(acc, batch, row, products, output):
    """y: with its bias and residual, and without the unit of the activation."""
    layout: gl.constexpr = acc.type.layout
    outer = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    y = acc * activation_unit(products.ACTIVATION, products.ACCURACY)
    if output.bias_ptr is not None:
        bias = gl.load(output.bias_ptr + outer, mask=outer < output.O, other=0.0)
        y += gl.expand_dims(bias.to(gl.float32), 0)
    if output.residual_ptr is not None:
        rows = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        offsets = gl.expand_dims((batch * products.x.step + rows).to(gl.int64) * output.stride_rm, 1)
        offsets += gl.expand_dims(outer, 0)
        inside = gl.expand_dims(rows < products.x.step, 1) & gl.expand_dims(outer < output.O, 0)
        y += gl.load(output.residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
    return y


@gluon.jit
def _consume(consumer: gl.constexpr, products, schedule, output):
    X_IN_REGISTERS: gl.constexpr = output.tiles is not None
    z_layout: gl.constexpr = zeros(HALF, products.UNITS).type.layout
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        row += consumer * HALF
        x_stage, phase = row_stage(consumer, turn, products)
        mbarrier.wait(products.x.full.index(x_stage), phase)
        x_tile = products.x.tiles.index(x_stage)
        if X_IN_REGISTERS:
            x_tile = x_tile.load(gl.DotOperandLayout(0, z_layout, 2))
            release_after_load(products.x.empty.index(x_stage))
        acc = zeros(HALF, output.y.block_type.shape[1])
        acc, position = multiply_twice(acc, x_tile, position, products, _pre_activations, _add_share)
        turn += 1
        y = _epilogue(acc, batch, row, products, output)
        if X_IN_REGISTERS:
            # The tile of y may still be on its way out from the turn before.
            tma.store_wait(0)
            y_tile = output.tiles.index(consumer)
        else:
            y_tile = x_tile
        y_tile.store(y.to(y_tile.dtype))
        fence_async_shared()
        copy_out(output.y, [batch * products.x.step + row, 0], y_tile)
        if not X_IN_REGISTERS:
            tma.store_wait(0)
            mbarrier.arrive(products.x.empty.index(x_stage))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["up_step", "down_step", "N", "M", "tiles", "row_tiles"])
def _sm90_forward_kernel(
    x_desc, up_desc, gate_desc, down_desc, y_desc, up_bias_ptr, gate_bias_ptr, down_bias_ptr, residual_ptr,
    stride_rm, up_step, down_step, N, M, tiles, row_tiles,
    O: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, EVEN_N: gl.constexpr,
    X_IN_REGISTERS: gl.constexpr, UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    ACCURACY: gl.constexpr,
):  # fmt: skip
    schedule = RowSchedule(tiles=tiles, entry_tiles=row_tiles, ROWS=HALF * CONSUMERS)
    products = make_products(
        x_desc, None, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, N, M, up_step, down_step, CONSUMERS,
        STAGES, CONSUMERS, EVEN_N, UP_TRANSPOSED, DOWN_TRANSPOSED, ACTIVATION, ACCURACY,
    )  # fmt: skip
    y_tiles = None
    if X_IN_REGISTERS:
        y_tiles = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout)
    output = _Output(
        y=y_desc, tiles=y_tiles, bias_ptr=down_bias_ptr, residual_ptr=residual_ptr, stride_rm=stride_rm, O=O
    )  # fmt: skip
    fence_async_shared()
    specialize(CONSUMERS, _consume, (products, schedule, output), load_tiles, (products, schedule))


def prepare_forward(operands: Operands, matrices: Matrices, residual: Matrix | None, config: Sm90Config) -> Launch:
    """The launch for operands that fit: see ``Operands.matrices``."""
    batch, rows, width, hidden, out_width = operands.sizes()
    block, block_k, block_o = config.block, sm90_width(width), sm90_width(out_width)
    row_tiles = -(-rows // (CONSUMER_ROWS * config.consumers))
    tiles = batch * row_tiles
    return Launch(
        _sm90_forward_kernel,
        min(tiles, config.programs),
        (0 if residual is None else residual.row_stride,),
        (matrices.up.step, matrices.down.step, hidden, rows, tiles, row_tiles),
        (
            out_width, config.consumers, config.stages, hidden % block == 0, width <= WIDEST_X_IN_REGISTERS,
            *last_constants(operands, matrices),
        ),
        geometries=(
            *geometries(matrices, None, CONSUMER_ROWS, block, block_k, block_o),
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
    biases = operands.up_bias, operands.gate_bias, down_bias
    prepared((x, operands.up, operands.gate, operands.down, y, *biases, residual))
    return y
