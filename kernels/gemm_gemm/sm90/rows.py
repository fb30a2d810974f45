"""Forward pass and data gradient on Hopper: rows stay on chip while the load warp streams the weights past them.

Each consumer has 64 rows at a time, and computes two products: its rows with a block of hidden units, and the hidden or
its gradient with the same units of the other weight. The gradient of the last bias is the sum of dy over its rows, and
is computed from dy while that is on chip.
"""

from typing import Any

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import (
    Resource,
    copy_out,
    dense,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    resources,
    tma,
    warpgroup_mma_wait,
)
from ...launching import Launch, Numbers
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, release_after_load, stage_of, wait_full
from ...matmul.sm90.roles import warp_specialize
from ...matmul.sm90.schedules import RowSchedule, rows_at
from ...tiles import only_before
from ...tuning import CONSUMER_ROWS, WIDEST_X_IN_REGISTERS, Sm90Config, sm90_width
from ..blocks import up_gradient
from ..operands import Matrices, Operands
from .mainloop import (
    add_product,
    config_of,
    geometries,
    load_rows,
    load_units,
    make_products,
    sizes_of,
    start_pre_activations,
    start_product,
)

_WIDEST_X_IN_REGISTERS = gl.constexpr(WIDEST_X_IN_REGISTERS)


@resources("rows tiles bias_ptr residual_ptr stride_rm dy_sums_ptr O")
class _Output(Resource):
    """The result, y or dx, and what the epilogue adds to y: bias and residual, None if absent.

    If x is in registers, the result is staged in ``tiles``, else in the buffer of x. At ``dy_sums_ptr`` each consumer
    has ``O`` sums of dy.
    """


@gluon.jit
def _row_stage(consumer: gl.constexpr, count, products):
    """(stage, phase of its full barrier) of a consumer's rows of the ``count``-th tile."""
    stage, phase = stage_of(count, products.x.STAGES // products.CONSUMERS)
    return stage * products.CONSUMERS + consumer, phase


@gluon.jit
def _load(products, schedule):
    """The load warp: for one tile after another, the rows of each consumer, and all hidden units."""
    position = 0
    count = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        for consumer in gl.static_range(products.CONSUMERS):
            stage, phase = _row_stage(consumer, count, products)
            full = products.x.full.index(stage)
            mbarrier.wait(products.x.empty.index(stage), phase ^ 1)
            mbarrier.expect(full, products.ROW_BYTES)
            load_rows(products, batch, row + consumer * HALF, full, stage)
        count += 1
        for n in range(0, products.N, products.UNITS):
            stage, full = acquire(products.up, position, products.UP_BYTES)
            load_units(products, batch, n, full, stage)
            if products.dy is None:
                stage, full = acquire(products.down, position, products.down.desc.block_type.nbytes)
                load_block(products.down, batch * products.down.step, n, full, stage)
            position += 1


@gluon.jit
def _first_products(acc, x_tile, dy_tile, stage, n, products):
    """The completed ``acc``, and (z, z_gate, dH) of the hidden units from ``n`` on; dH in the backward pass only."""
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
    """Start ``acc + H W_downᵀ``, or with dy ``acc + dZ W_up (+ dZg W_gate)``, of the hidden units from ``n`` on."""
    z, z_gate, d_hidden = block
    GATED: gl.constexpr = products.gate is not None
    hidden, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ARITHMETIC)
    # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
    units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, z.type.layout))
    if products.dy is None:
        hidden = only_before(hidden, units, products.N, EVEN_N)
        acc = add_product(hidden, rows_first(products.down, wait_full(products.down, position)), acc)
    else:
        stage = position % products.up.STAGES
        dz = up_gradient(d_hidden, slope, z, GATED, products.ARITHMETIC)
        acc = add_product(only_before(dz, units, products.N, EVEN_N), rows_first(products.up, stage), acc)
        if GATED:
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ARITHMETIC)
            acc = add_product(only_before(dz, units, products.N, EVEN_N), rows_first(products.gate, stage), acc)
    return acc


@gluon.jit
def _multiply_twice(acc, x_tile, dy_tile, position, products):
    """(``acc`` plus the second product of all hidden units, the next position in the rings of the weights)."""
    stage = wait_full(products.up, position)
    acc, block = _first_products(acc, x_tile, dy_tile, stage, 0, products)
    if products.dy is None:
        mbarrier.arrive(products.up.empty.index(stage))
    for n in range(products.UNITS, products.N, products.UNITS):
        # Only the last block may extend past N.
        acc = _add_second_product(acc, block, n - products.UNITS, position, products, True)
        done = stage
        position += 1
        stage = wait_full(products.up, position)
        # The first products of the next block overlap with the second product of this one.
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
def _add_bias_and_residual(y, batch, row, products, output):
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
        # Each warp sums a quarter of the columns, and each thread eight of them, so that no sum crosses a warp. A read
        # of shared memory takes at least the 8 rows of the swizzle pattern.
        COLUMNS: gl.constexpr = products.dy.desc.block_type.shape[1]
        LANES: gl.constexpr = COLUMNS // 32
        READ_ROWS: gl.constexpr = max(8, 32 // LANES)
        read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 4], [1, 0])
        dy_sums = gl.zeros([READ_ROWS, COLUMNS], gl.float32, read_layout)
    position = 0
    count = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        row += consumer * HALF
        stage, phase = _row_stage(consumer, count, products)
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
        count += 1
        if SUMS:
            for first in gl.static_range(0, HALF, READ_ROWS):
                dy_sums += products.dy.tiles.index(stage).slice(first, READ_ROWS).load(read_layout).to(gl.float32)
        unit: gl.constexpr = activation_unit(products.ARITHMETIC.activation, products.ARITHMETIC.accuracy)
        result = _add_bias_and_residual(acc * unit, batch, row, products, output)
        if IN_REGISTERS:
            # The store of the previous tile may still read this buffer.
            tma.store_wait(0)
        out_tile.store(result.to(out_tile.dtype))
        fence_async_shared()
        copy_out(output.rows, [batch * products.x.step + row, 0], out_tile)
        if not IN_REGISTERS:
            # The result overwrote x in this stage, which is released once the result is stored.
            tma.store_wait(0)
            mbarrier.arrive(products.x.empty.index(stage))
    if IN_REGISTERS:
        tma.store_wait(0)
    if SUMS:
        part = gl.program_id(0).to(gl.int64) * products.CONSUMERS + consumer
        outer = gl.arange(0, COLUMNS, gl.SliceLayout(0, read_layout))
        gl.store(output.dy_sums_ptr + part * output.O + outer, gl.sum(dy_sums, 0), mask=outer < output.O)


@gluon.jit(do_not_specialize=["N", "M", "up_step", "down_step", "tiles", "entry_tiles"])
def _sm90_forward_kernel(
    x_desc, up_desc, gate_desc, down_desc, y_desc, up_bias_ptr, gate_bias_ptr, seed_ptr, down_bias_ptr, residual_ptr,
    stride_rm, N, M, up_step, down_step, tiles, entry_tiles,
    CONFIG: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    O: gl.constexpr = CONFIG.o
    CONSUMERS: gl.constexpr = CONFIG.consumers
    schedule = RowSchedule(tiles=tiles, entry_tiles=entry_tiles, ROWS=HALF * CONSUMERS)
    products = make_products(
        x_desc, None, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, (N, M, up_step, down_step),
        CONFIG.even, CONFIG, ARITHMETIC,
    )  # fmt: skip
    y_tiles = None
    if x_desc.block_type.shape[1] <= _WIDEST_X_IN_REGISTERS:
        y_tiles = gl.allocate_shared_memory(y_desc.dtype, [CONSUMERS] + y_desc.block_type.shape, y_desc.layout)
    output = _Output(
        rows=y_desc, tiles=y_tiles, bias_ptr=down_bias_ptr, residual_ptr=residual_ptr, stride_rm=stride_rm,
        dy_sums_ptr=None, O=O,
    )  # fmt: skip
    fence_async_shared()
    warp_specialize(CONSUMERS, _consume, (products, schedule, output), _load, (products, schedule))


@gluon.jit(do_not_specialize=["N", "M", "up_step", "down_step", "tiles", "entry_tiles"])
def _sm90_data_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, dx_desc, up_bias_ptr, gate_bias_ptr, seed_ptr, dy_sums_ptr,
    N, M, up_step, down_step, tiles, entry_tiles,
    CONFIG: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    O: gl.constexpr = CONFIG.o
    schedule = RowSchedule(tiles=tiles, entry_tiles=entry_tiles, ROWS=HALF * CONFIG.consumers)
    products = make_products(
        x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, (N, M, up_step, down_step),
        CONFIG.even, CONFIG, ARITHMETIC,
    )  # fmt: skip
    output = _Output(
        rows=dx_desc, tiles=None, bias_ptr=None, residual_ptr=None, stride_rm=0, dy_sums_ptr=dy_sums_ptr, O=O
    )  # fmt: skip
    fence_async_shared()
    warp_specialize(CONFIG.consumers, _consume, (products, schedule, output), _load, (products, schedule))


def prepare_forward(operands: Operands, matrices: Matrices, config: Sm90Config) -> Launch:
    """The launch, whose tensors are those of the generic kernel."""
    numbers = (0 if matrices.beside is None else matrices.beside.row_stride,)
    alone = matrices._replace(beside=None)
    return _prepare(_sm90_forward_kernel, operands, alone, operands.down.shape[-2], numbers, config)


def prepare_data_gradient(
    operands: Operands, matrices: Matrices, column_sums: bool, config: Sm90Config
) -> tuple[Launch, tuple[int, int] | None]:
    """The launch, whose tensors are those of the generic kernel, and the shape of the partial sums of dy.

    None if these are not requested, or if the widest gated kernel has no registers left for them.
    """
    batch, rows, width, _, out_width = operands.sizes()
    launch = _prepare(_sm90_data_gradient_kernel, operands, matrices, width, (), config)
    programs = min(batch * config.row_tiles(rows), config.programs)
    summed = column_sums and (matrices.gate is None or width <= 128)
    return launch, (programs * config.consumers, out_width) if summed else None


def _prepare(
    kernel: Any, operands: Operands, matrices: Matrices, columns: int, numbers: Numbers, config: Sm90Config
) -> Launch:
    """The launch of a kernel with specialised ``numbers``, for a result of ``columns`` columns."""
    batch, rows, width, hidden, out_width = operands.sizes()
    tiles = batch * config.row_tiles(rows)
    row_stages, even = config.consumers * config.row_stages, hidden % config.block == 0
    compiled = config_of(operands, matrices, config.consumers, config.stages, row_stages, even)
    return Launch(
        kernel,
        min(tiles, config.programs),
        numbers,
        (*sizes_of(operands, matrices), tiles, config.row_tiles(rows)),
        (compiled, operands.arithmetic.sm90_constants),
        geometries=(
            *geometries(matrices, CONSUMER_ROWS, config.block, sm90_width(width), sm90_width(out_width)),
            dense(batch * rows, columns, CONSUMER_ROWS, sm90_width(columns)),
        ),
    )
