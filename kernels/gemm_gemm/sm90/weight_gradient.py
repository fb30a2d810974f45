"""Weight gradients on Hopper: each consumer keeps 64 hidden units' weights and sums while rows of x and dy stream past.

Everything hidden is kept transposed, ``[hidden units, rows]``: it is the left operand of each gradient's product.
"""

from typing import Any

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import Matrix, fence_async_shared, gl, gluon, mbarrier, resources, warpgroup_mma_wait
from ...launching import Launch
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import rows_first
from ...matmul.sm90.ring import HALF, acquire, wait_full
from ...matmul.sm90.roles import specialize
from ...tiles import only_before, split_range
from ...tuning import CONSUMER_ROWS, Sm90Config, sm90_width
from ..operands import Matrices, Operands
from .mainloop import (
    add_product,
    geometries,
    last_constants,
    load_rows,
    load_units,
    make_gradients,
    make_products,
    start_product,
    up_gradient,
)


@resources
class _Split:
    """Which part of the gradients a program computes: the rows and the hidden units of one batch entry."""

    batch: Any
    first_unit: Any
    first_row: Any
    end_row: Any
    BLOCK_M: Any
    EVEN_M: Any


@gluon.jit
def _load(products, split):
    for consumer in gl.static_range(products.CONSUMERS):
        full = products.up.full.index(consumer)
        mbarrier.expect(full, products.UP_BYTES)
        load_units(products, split.batch, split.first_unit + consumer * HALF, full, consumer)
    position = 0
    for row in range(split.first_row, split.end_row, split.BLOCK_M):
        stage, full = acquire(products.x, position, products.ROW_BYTES)
        load_rows(products, split.batch, row, full, stage)
        position += 1


@gluon.jit
def _unit_bias(bias_ptr, units, N):
    return gl.expand_dims(gl.load(bias_ptr + units, mask=units < N, other=0.0).to(gl.float32), 1)


@gluon.jit
def _add(values, sums, bias_sums, tile, ptr, bias_ptr, rows, products, split):
    """Starts ``sums + values tile`` and adds up ``values``, or what is wanted of that."""
    # Past M, x and dy load as 0, but 0 times an infinite weight or bias is NaN.
    values = only_before(values, rows, products.x.step, split.EVEN_M)
    if bias_ptr is not None:
        bias_sums += gl.sum(values, 1)
    if ptr is not None:
        sums = add_product(values, tile, sums)
    return sums, bias_sums


@gluon.jit
def _finished(sums, ptr):
    if ptr is not None:
        sums = warpgroup_mma_wait(0, [sums])
    return sums


@gluon.jit
def _store_matrix(ptr, sums, first_unit, products, WIDTH: gl.constexpr, UNITS_FIRST: gl.constexpr):
    """Stores sums, the hidden units first, into a dense ``[N, WIDTH]`` matrix, or a ``[WIDTH, N]`` one."""
    if ptr is not None:
        sums *= activation_unit(products.ACTIVATION, products.ACCURACY)
        units = first_unit + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        inner = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
        rows, columns = gl.expand_dims(units.to(gl.int64), 1), gl.expand_dims(inner.to(gl.int64), 0)
        if UNITS_FIRST:
            offsets = rows * WIDTH + columns
        else:
            offsets = rows + columns * products.N
        inside = gl.expand_dims(units < products.N, 1) & gl.expand_dims(inner < WIDTH, 0)
        gl.store(ptr + offsets, sums.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _store_vector(ptr, sums, units, products):
    if ptr is not None:
        sums *= activation_unit(products.ACTIVATION, products.ACCURACY)
        gl.store(ptr + units, sums.to(ptr.dtype.element_ty), mask=units < products.N)


@gluon.jit
def _consume(consumer: gl.constexpr, products, split, given):
    GATED: gl.constexpr = products.gate is not None
    DOWN: gl.constexpr = given.down_ptr is not None
    UP: gl.constexpr = (given.up_ptr is not None) or (given.up_bias_ptr is not None)
    GATE: gl.constexpr = (given.gate_ptr is not None) or (given.gate_bias_ptr is not None)
    z_layout: gl.constexpr = zeros(HALF, split.BLOCK_M).type.layout
    first_unit = split.first_unit + consumer * HALF
    units = first_unit + gl.arange(0, HALF, gl.SliceLayout(1, z_layout))
    rows = gl.arange(0, split.BLOCK_M, gl.SliceLayout(0, z_layout))
    mbarrier.wait(products.up.full.index(consumer), 0)
    up, down = rows_first(products.up, consumer), rows_first(products.down, consumer)
    up_bias = None
    gate_bias = None
    if products.up_bias_ptr is not None:
        up_bias = _unit_bias(products.up_bias_ptr, units, products.N)
    if GATED:
        gate = rows_first(products.gate, consumer)
    if products.gate_bias_ptr is not None:
        gate_bias = _unit_bias(products.gate_bias_ptr, units, products.N)
    d_up = zeros(HALF, products.x.desc.block_type.shape[1])
    d_gate = zeros(HALF, products.x.desc.block_type.shape[1])
    d_down = zeros(HALF, products.dy.desc.block_type.shape[1])
    d_up_bias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, z_layout))
    d_gate_bias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, z_layout))
    position = 0
    for row in range(split.first_row, split.end_row, split.BLOCK_M):
        stage = wait_full(products.x, position)
        x_tile, dy_tile = products.x.tiles.index(stage), products.dy.tiles.index(stage)
        z = start_product(up, x_tile, up_bias)
        if GATED:
            z_gate = start_product(gate, x_tile, gate_bias)
        # Each product is waited for where its result is needed, so that the next ones run beside the arithmetic.
        PENDING: gl.constexpr = 1 if UP or GATE else 0
        if UP or GATE:
            d_hidden = start_product(down, dy_tile, None)
        z = warpgroup_mma_wait(PENDING, [z])
        if GATED:
            z_gate = warpgroup_mma_wait(PENDING, [z_gate])
        else:
            z_gate = z
        values, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ACTIVATION, products.ACCURACY)
        d_down, _ = _add(values, d_down, d_up_bias, dy_tile, given.down_ptr, None, row + rows, products, split)
        if UP or GATE:
            d_hidden = warpgroup_mma_wait(1 if DOWN else 0, [d_hidden])
        if UP:
            dz = up_gradient(d_hidden, slope, z, GATED, products.ACTIVATION)
            d_up, d_up_bias = _add(
                dz, d_up, d_up_bias, x_tile, given.up_ptr, given.up_bias_ptr, row + rows, products, split
            )  # fmt: skip
        if GATE:
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ACTIVATION)
            d_gate, d_gate_bias = _add(
                dz, d_gate, d_gate_bias, x_tile, given.gate_ptr, given.gate_bias_ptr, row + rows, products, split
            )  # fmt: skip
        d_down = _finished(d_down, given.down_ptr)
        d_up = _finished(d_up, given.up_ptr)
        d_gate = _finished(d_gate, given.gate_ptr)
        mbarrier.arrive(products.x.empty.index(stage))
        position += 1
    _store_matrix(given.up_ptr, d_up, first_unit, products, given.K, not given.TRANSPOSED)
    _store_matrix(given.gate_ptr, d_gate, first_unit, products, given.K, not given.TRANSPOSED)
    _store_matrix(given.down_ptr, d_down, first_unit, products, given.O, given.TRANSPOSED)
    _store_vector(given.up_bias_ptr, d_up_bias, units, products)
    _store_vector(given.gate_bias_ptr, d_gate_bias, units, products)


@gluon.jit(do_not_specialize=["stride_split", "up_step", "down_step", "N", "M", "splits"])
def _sm90_weight_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr,
    d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr,
    stride_split, up_step, down_step, N, M, splits,
    K: gl.constexpr, O: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    EVEN_M: gl.constexpr, GRADIENTS_TRANSPOSED: gl.constexpr, UP_TRANSPOSED: gl.constexpr,
    DOWN_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    program = gl.program_id(0)
    unit_tiles = gl.cdiv(N, HALF * CONSUMERS)
    number = program % splits
    batch = program // splits // unit_tiles
    first_unit = (program // splits % unit_tiles) * (HALF * CONSUMERS)
    first_row, end_row = split_range(number, M, splits, BLOCK_M)
    split = _Split(
        batch=batch, first_unit=first_unit, first_row=first_row, end_row=end_row,
        BLOCK_M=BLOCK_M, EVEN_M=EVEN_M,
    )  # fmt: skip
    given = make_gradients(
        d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr, None, number.to(gl.int64) * stride_split,
        batch.to(gl.int64) * N, K, O, GRADIENTS_TRANSPOSED,
    )  # fmt: skip
    products = make_products(
        x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, N, M, up_step, down_step, STAGES,
        CONSUMERS, CONSUMERS, False, UP_TRANSPOSED, DOWN_TRANSPOSED, ACTIVATION, ACCURACY, WEIGHTS_STAY=True,
    )  # fmt: skip
    fence_async_shared()
    specialize(CONSUMERS, _consume, (products, split, given), _load, (products, split))


def prepare_weight_gradient(
    operands: Operands,
    matrices: Matrices,
    dy: Matrix,
    split_size: int,
    transposed: bool,
    splits: int,
    config: Sm90Config,
) -> Launch:
    """The launch of one pass over x and dy.

    ``transposed`` gradients have the layout of a batched GEMM-GEMM's operands. Its tensors are x, dy, up, gate, down,
    both biases, and those to fill, gradients or the first split's partials, as ``WeightGradients`` has them.
    """
    batch, rows, width, hidden, out_width = operands.sizes()
    block_k, block_o = sm90_width(width), sm90_width(out_width)
    even = rows % config.block == 0 and (splits > 1 or batch > 1)
    return Launch(
        _sm90_weight_gradient_kernel,
        batch * -(-hidden // (CONSUMER_ROWS * config.consumers)) * splits,
        (),
        (split_size, matrices.up.step, matrices.down.step, hidden, rows, splits),
        (
            width, out_width, config.consumers, config.stages, even, transposed,
            *last_constants(operands, matrices),
        ),
        geometries=geometries(matrices, dy, config.block, CONSUMER_ROWS, block_k, block_o),
    )  # fmt: skip
