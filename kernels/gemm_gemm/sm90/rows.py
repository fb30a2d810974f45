"""One pass over rows on Hopper: forward, or to dx. Rows stay on chip while the load warp streams the weights past them.

Each consumer has 64 rows at a time, and multiplies twice: its rows with a block of hidden units, and what it makes of
that with the same units of the other weight. The gradient of the last bias, the sum of dy over its rows, comes from the
same reading of dy.
"""

from typing import Any

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import copy_out, dense, fence_async_shared, gl, gluon, mbarrier, resources, tma, warpgroup_mma_wait
from ...launching import Launch, Numbers
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, release_after_load, stage_of, wait_full
from ...matmul.sm90.roles import specialize
from ...matmul.sm90.schedules import RowSchedule, rows_at
from ...tiles import only_before
from ...tuning import CONSUMER_ROWS, WIDEST_X_IN_REGISTERS, Sm90Config, sm90_width
from ..blocks import up_gradient
from ..operands import Matrices, Operands
from .mainloop import (
    add_product,
    geometries,
    load_rows,
    load_units,
    make_products,
    sizes_and_how,
    start_pre_activations,
    start_product,
)

_WIDEST_X_IN_REGISTERS = gl.constexpr(WIDEST_X_IN_REGISTERS)


@resources
class _Output:
    """Where rows of y or dx go: through ``tiles`` where x is in registers, else through the place of x.

    What joins y is None for dx, and what is not asked for. Behind ``dy_sums_ptr`` each consumer has ``O`` sums of dy.
    """

    rows: Any
    tiles: Any
    bias_ptr: Any
    residual_ptr: Any
    stride_rm: Any
    dy_sums_ptr: Any
    O: Any


@gluon.jit
def _row_stage(consumer: gl.constexpr, turn, products):
    """(stage, phase of its full barrier) of a consumer's rows of the ``turn``-th tile."""
    stage, phase = stage_of(turn, products.x.STAGES // products.CONSUMERS)
    return stage * products.CONSUMERS + consumer, phase


@gluon.jit
def _load(products, schedule):
    """For one tile after another, the rows of each consumer, and all hidden units."""
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        for consumer in gl.static_range(products.CONSUMERS):
            stage, phase = _row_stage(consumer, turn, products)
            full = products.x.full.index(stage)
            mbarrier.wait(products.x.empty.index(stage), phase ^ 1)
            mbarrier.expect(full, products.ROW_BYTES)
            load_rows(products, batch, row + consumer * HALF, full, stage)
        turn += 1
        for n in range(0, products.N, products.UNITS):
            stage, full = acquire(products.up, position, products.UP_BYTES)
            load_units(products, batch, n, full, stage)
            if products.dy is None:
                stage, full = acquire(products.down, position, products.down.desc.block_type.nbytes)
                load_block(products.down, batch * products.down.step, n, full, stage)
            position += 1


@gluon.jit
def _first_products(acc, x_tile, dy_tile, stage, n, products):
    """``acc``, once it is complete, and z, z_gate and, in the backward pass, dH of the hidden units from ``n`` on."""
    z = start_pre_activations(x_tile, products.up, products.up_bias_ptr, stage, n, products)
    if products.dy is not None:
        d_hidden = start_product(dy_tile, rows_first(products.down, stage), None)
    if products.gate is not None:
        z_gate = start_pre_activations(x_tile, products.gate, products.gate_bias_ptr, stage, n, products)
    if products.dy is not None and products.gate is not None:
        acc, z, d_hidden, z_gate = warpgroup_mma_wait(0, [acc, z, d_hidden, z_gate])
    elif products.dy is not None:
        acc, z, d_hidden = warpgroup_mma_wait(0, [acc, z, d_hidden])
        z_gate = z
    elif products.gate is not None:
        acc, z, z_gate = warpgroup_mma_wait(0, [acc, z, z_gate])
        d_hidden = z
    else:
        acc, z = warpgroup_mma_wait(0, [acc, z])
        z_gate, d_hidden = z, z
    return acc, (z, z_gate, d_hidden)


@gluon.jit
def _add_second_product(acc, block, n, position, products, EVEN_N: gl.constexpr):
    """Starts ``acc + H W_downᵀ``, or with dy ``acc + dZ W_up (+ dZg W_gate)``, of the hidden units from ``n`` on."""
    z, z_gate, d_hidden = block
    GATED: gl.constexpr = products.gate is not None
    hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ACTIVATION, products.ACCURACY)
    # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
    units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, z.type.layout))
    if products.dy is None:
        hidden = only_before(hidden, units, products.N, EVEN_N)
        acc = add_product(hidden, rows_first(products.down, wait_full(products.down, position)), acc)
    else:
        stage = position % products.up.STAGES
        dz = up_gradient(d_hidden, slope, z, GATED, products.ACTIVATION)
        acc = add_product(only_before(dz, units, products.N, EVEN_N), rows_first(products.up, stage), acc)
        if GATED:
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ACTIVATION)
            acc = add_product(only_before(dz, units, products.N, EVEN_N), rows_first(products.gate, stage), acc)
    return acc


@gluon.jit
def _multiply_twice(acc, x_tile, dy_tile, position, products):
    """(``acc`` and the second product of all hidden units, the position behind these in the rings of the weights)."""
    stage = wait_full(products.up, position)
    acc, block = _first_products(acc, x_tile, dy_tile, stage, 0, products)
    if products.dy is None:
        mbarrier.arrive(products.up.empty.index(stage))
    for n in range(products.UNITS, products.N, products.UNITS):
        # Only the last block can reach past N.
        acc = _add_second_product(acc, block, n - products.UNITS, position, products, True)
        done = stage
        position += 1
        stage = wait_full(products.up, position)
        # The next first products are under way together with this block's second one.
        acc, block = _first_products(acc, x_tile, dy_tile, stage, n, products)
        mbarrier.arrive(products.down.empty.index(done))
        if products.dy is None:
            mbarrier.arrive(products.up.empty.index(stage))
    last = (gl.cdiv(products.N, products.UNITS) - 1) * products.UNITS
    acc = _add_second_product(acc, block, last, position, products, products.EVEN_N)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(products.down.empty.index(stage))
    return acc, position + 1


@gluon.jit
def _joined(y, batch, row, products, output):
    """The rows of a result with the bias and the residual."""
    layout: gl.constexpr = y.type.layout
    outer = gl.arange(0, y.shape[1], gl.SliceLayout(0, layout))
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
    IN_REGISTERS: gl.constexpr = output.tiles is not None
    SUMS: gl.constexpr = output.dy_sums_ptr is not None
    if SUMS:
        # Each warp adds up a quarter of the columns, each thread eight of them, so that no sum crosses a warp; a read
        # of shared memory takes at least the 8 rows of its swizzling pattern.
        COLUMNS: gl.constexpr = products.dy.desc.block_type.shape[1]
        LANES: gl.constexpr = COLUMNS // 32
        READ_ROWS: gl.constexpr = max(8, 32 // LANES)
        read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 4], [1, 0])
        dy_sums = gl.zeros([READ_ROWS, COLUMNS], gl.float32, read_layout)
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        row += consumer * HALF
        stage, phase = _row_stage(consumer, turn, products)
        mbarrier.wait(products.x.full.index(stage), phase)
        x_tile = products.x.tiles.index(stage)
        out_tile = x_tile
        dy_tile = None
        if products.dy is not None:
            dy_tile = products.dy.tiles.index(stage)
        if IN_REGISTERS:
            out_tile = output.tiles.index(consumer)
            x_tile = x_tile.load(gl.DotOperandLayout(0, zeros(HALF, products.UNITS).type.layout, 2))
            release_after_load(products.x.empty.index(stage))
        acc = zeros(HALF, output.rows.block_type.shape[1])
        acc, position = _multiply_twice(acc, x_tile, dy_tile, position, products)
        turn += 1
        if SUMS:
            for first in gl.static_range(0, HALF, READ_ROWS):
                dy_sums += products.dy.tiles.index(stage).slice(first, READ_ROWS).load(read_layout).to(gl.float32)
        result = _joined(acc * activation_unit(products.ACTIVATION, products.ACCURACY), batch, row, products, output)
        if IN_REGISTERS:
            # The tile may still be on its way out from the turn before.
            tma.store_wait(0)
        out_tile.store(result.to(out_tile.dtype))
        fence_async_shared()
        copy_out(output.rows, [batch * products.x.step + row, 0], out_tile)
        if not IN_REGISTERS:
            # x is needed no more: the result has taken its place, which is given back once it has left.
            tma.store_wait(0)
            mbarrier.arrive(products.x.empty.index(stage))
    if IN_REGISTERS:
        tma.store_wait(0)
    if SUMS:
        part = gl.program_id(0) * products.CONSUMERS + consumer
        outer = gl.arange(0, COLUMNS, gl.SliceLayout(0, read_layout))
        gl.store(output.dy_sums_ptr + part * output.O + outer, gl.sum(dy_sums, 0), mask=outer < output.O)


@gluon.jit(do_not_specialize=["N", "M", "up_step", "down_step", "tiles", "entry_tiles"])
def _sm90_forward_kernel(
    x_desc, up_desc, gate_desc, down_desc, y_desc, up_bias_ptr, gate_bias_ptr, seed_ptr, down_bias_ptr, residual_ptr,
    stride_rm, N, M, up_step, down_step, tiles, entry_tiles,
    O: gl.constexpr, PIPELINE: gl.constexpr, EVEN_N: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = PIPELINE[0]
    schedule = RowSchedule(tiles=tiles, entry_tiles=entry_tiles, ROWS=HALF * CONSUMERS)
    products = make_products(
        x_desc, None, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, (N, M, up_step, down_step),
        PIPELINE, EVEN_N, HOW,
    )  # fmt: skip
    y_tiles = None
    if x_desc.block_type.shape[1] <= _WIDEST_X_IN_REGISTERS:
        y_tiles = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout)
    output = _Output(
        rows=y_desc, tiles=y_tiles, bias_ptr=down_bias_ptr, residual_ptr=residual_ptr, stride_rm=stride_rm,
        dy_sums_ptr=None, O=O,
    )  # fmt: skip
    fence_async_shared()
    specialize(CONSUMERS, _consume, (products, schedule, output), _load, (products, schedule))


@gluon.jit(do_not_specialize=["N", "M", "up_step", "down_step", "tiles", "entry_tiles"])
def _sm90_data_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, dx_desc, up_bias_ptr, gate_bias_ptr, seed_ptr, dy_sums_ptr,
    N, M, up_step, down_step, tiles, entry_tiles,
    O: gl.constexpr, PIPELINE: gl.constexpr, EVEN_N: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    schedule = RowSchedule(tiles=tiles, entry_tiles=entry_tiles, ROWS=HALF * PIPELINE[0])
    products = make_products(
        x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, (N, M, up_step, down_step),
        PIPELINE, EVEN_N, HOW,
    )  # fmt: skip
    output = _Output(
        rows=dx_desc, tiles=None, bias_ptr=None, residual_ptr=None, stride_rm=0, dy_sums_ptr=dy_sums_ptr, O=O
    )  # fmt: skip
    fence_async_shared()
    specialize(PIPELINE[0], _consume, (products, schedule, output), _load, (products, schedule))


def prepare_forward(operands: Operands, matrices: Matrices, config: Sm90Config) -> Launch:
    """The launch, with a residual beside x; its tensors are those of the generic kernel."""
    numbers = (0 if matrices.beside is None else matrices.beside.row_stride,)
    alone = matrices._replace(beside=None)
    return _prepare(_sm90_forward_kernel, operands, alone, operands.down.shape[-2], numbers, config)


def prepare_data_gradient(
    operands: Operands, matrices: Matrices, column_sums: bool, config: Sm90Config
) -> tuple[Launch, tuple[int, int] | None]:
    """The launch, whose tensors are those of the generic kernel, and the shape of the partial sums of dy.

    None where these are not asked for, or the widest gated kernel has no registers left for them.
    """
    batch, rows, width, _, out_width = operands.sizes()
    launch = _prepare(_sm90_data_gradient_kernel, operands, matrices, width, (), config)
    programs = min(batch * config.row_tiles(rows), config.programs)
    summed = column_sums and (matrices.gate is None or width <= 128)
    return launch, (programs * config.consumers, out_width) if summed else None


def _prepare(
    kernel: Any, operands: Operands, matrices: Matrices, columns: int, numbers: Numbers, config: Sm90Config
) -> Launch:
    """The launch of a kernel with ``numbers`` of its own, for a result of so many columns."""
    batch, rows, width, hidden, out_width = operands.sizes()
    tiles = batch * config.row_tiles(rows)
    sizes, how = sizes_and_how(operands, matrices)
    pipeline = config.consumers, config.stages, config.consumers * config.row_stages
    return Launch(
        kernel,
        min(tiles, config.programs),
        numbers,
        (*sizes, tiles, config.row_tiles(rows)),
        (out_width, pipeline, hidden % config.block == 0, how),
        geometries=(
            *geometries(matrices, CONSUMER_ROWS, config.block, sm90_width(width), sm90_width(out_width)),
            dense(batch * rows, columns, CONSUMER_ROWS, sm90_width(columns)),
        ),
    )
