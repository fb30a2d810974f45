"""Weight gradients on Hopper: consumers keep weights and sums of 64 hidden units each; rows of x and dy stream past.

The hidden and its gradients are transposed, ``[hidden units, rows]``: they are left operands of the products.
"""

from ...activations import activation_unit, hidden_and_slopes, through_activation
from ...hopper import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma_wait
from ...launching import Launch
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import rows_first
from ...matmul.sm90.ring import HALF, acquire, wait_full
from ...matmul.sm90.roles import warp_specialize
from ...tiles import only_before, split_range
from ...tuning import CONSUMER_ROWS, Sm90Config, sm90_width
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
    start_product,
)


@gluon.jit
def _load(products, batch, first_unit, first_row, end_row):
    for consumer in gl.static_range(products.CONSUMERS):
        full = products.up.full.index(consumer)
        mbarrier.expect(full, products.UP_BYTES)
        load_units(products, batch, first_unit + consumer * HALF, full, consumer)
    position = 0
    for row in range(first_row, end_row, products.x.desc.block_type.shape[0]):
        stage, full = acquire(products.x, position, products.ROW_BYTES)
        load_rows(products, batch, row, full, stage)
        position += 1


@gluon.jit
def _unit_bias(bias_ptr, units, N):
    return gl.expand_dims(gl.load(bias_ptr + units, mask=units < N, other=0.0).to(gl.float32), 1)


@gluon.jit
def _add(values, sums, bias_sums, tile, ptr, bias_ptr, rows, M, EVEN_M: gl.constexpr):
    """Start ``sums + values tile`` and sum ``values``, as far as there are pointers for the results."""
    # Past M, x and dy load as 0, but 0 times an infinite weight or bias is NaN.
    values = only_before(values, rows, M, EVEN_M)
    if bias_ptr is not None:
        bias_sums += gl.sum(values, 1)
    if ptr is not None:
        sums = add_product(values, tile, sums)
    return sums, bias_sums


@gluon.jit
def store_sums(ptr, sums, unit, column, units, width, UNITS_FIRST: gl.constexpr, first=0):
    """Store sums, if there is a pointer, at (unit, column) of the dense ``[units, width]`` that begins at ``first``.

    Without ``UNITS_FIRST`` it is ``[width, units]``.
    """
    if ptr is not None:
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
        inside = gl.expand_dims(rows < units - unit, 1) & gl.expand_dims(columns < width - column, 0)
        if UNITS_FIRST:
            target = ptr + (first + unit.to(gl.int64) * width + column)
            offsets = gl.expand_dims(rows * width, 1) + gl.expand_dims(columns, 0)
        else:
            target = ptr + (first + unit)
            offsets = gl.expand_dims(rows, 1) + gl.expand_dims((column + columns).to(gl.int64) * units, 0)
        gl.store(target + offsets, sums.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_bias_sums(ptr, sums, unit, units, first=0):
    """The same for a vector of sums."""
    if ptr is not None:
        rows = gl.arange(0, sums.shape[0], sums.type.layout)
        gl.store(ptr + (first + unit) + rows, sums.to(ptr.dtype.element_ty), mask=rows < units - unit)


@gluon.jit
def _consume(
    consumer: gl.constexpr, products, first_unit, first_row, end_row, gradients, K: gl.constexpr, O: gl.constexpr,
    EVEN_M: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr = gradients
    GATED: gl.constexpr = products.gate is not None
    DOWN: gl.constexpr = down_ptr is not None
    UP: gl.constexpr = (up_ptr is not None) or (up_bias_ptr is not None)
    GATE: gl.constexpr = (gate_ptr is not None) or (gate_bias_ptr is not None)
    BLOCK_M: gl.constexpr = products.x.desc.block_type.shape[0]
    N, M = products.N, products.x.step
    z_layout: gl.constexpr = zeros(HALF, BLOCK_M).type.layout
    first_unit += consumer * HALF
    units = first_unit + gl.arange(0, HALF, gl.SliceLayout(1, z_layout))
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(0, z_layout))
    mbarrier.wait(products.up.full.index(consumer), 0)
    up, down = rows_first(products.up, consumer), rows_first(products.down, consumer)
    up_bias = None
    gate_bias = None
    if products.up_bias_ptr is not None:
        up_bias = _unit_bias(products.up_bias_ptr, units, N)
    if products.gate_bias_ptr is not None:
        gate_bias = _unit_bias(products.gate_bias_ptr, units, N)
    if GATED:
        gate = rows_first(products.gate, consumer)
    d_up = zeros(HALF, products.x.desc.block_type.shape[1])
    d_gate = zeros(HALF, products.x.desc.block_type.shape[1])
    d_down = zeros(HALF, products.dy.desc.block_type.shape[1])
    d_up_bias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, z_layout))
    d_gate_bias = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, z_layout))
    position = 0
    for row in range(first_row, end_row, BLOCK_M):
        stage = wait_full(products.x, position)
        x_tile, dy_tile = products.x.tiles.index(stage), products.dy.tiles.index(stage)
        z = start_product(up, x_tile, up_bias)
        if GATED:
            z_gate = start_product(gate, x_tile, gate_bias)
        # Wait for each product only where its result is needed: the next ones overlap with the arithmetic.
        PENDING: gl.constexpr = 1 if UP or GATE else 0
        if UP or GATE:
            d_hidden = start_product(down, dy_tile, None)
        z = warpgroup_mma_wait(PENDING, [z])
        if GATED:
            z_gate = warpgroup_mma_wait(PENDING, [z_gate])
        else:
            z_gate = z
        values, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, products.ARITHMETIC)
        d_down, _ = _add(values, d_down, d_up_bias, dy_tile, down_ptr, None, row + rows, M, EVEN_M)
        if UP or GATE:
            d_hidden = warpgroup_mma_wait(1 if DOWN else 0, [d_hidden])
        if UP:
            dz = up_gradient(d_hidden, slope, z, GATED, products.ARITHMETIC)
            d_up, d_up_bias = _add(dz, d_up, d_up_bias, x_tile, up_ptr, up_bias_ptr, row + rows, M, EVEN_M)
        if GATE:
            dz = through_activation(d_hidden, gate_slope, z_gate, products.ARITHMETIC)
            d_gate, d_gate_bias = _add(dz, d_gate, d_gate_bias, x_tile, gate_ptr, gate_bias_ptr, row + rows, M, EVEN_M)
        if DOWN:
            d_down = warpgroup_mma_wait(0, [d_down])
        if up_ptr is not None:
            d_up = warpgroup_mma_wait(0, [d_up])
        if gate_ptr is not None:
            d_gate = warpgroup_mma_wait(0, [d_gate])
        mbarrier.arrive(products.x.empty.index(stage))
        position += 1
    unit = activation_unit(products.ARITHMETIC.activation, products.ARITHMETIC.accuracy)
    store_sums(up_ptr, d_up * unit, first_unit, 0, N, K, not TRANSPOSED)
    store_sums(gate_ptr, d_gate * unit, first_unit, 0, N, K, not TRANSPOSED)
    store_sums(down_ptr, d_down * unit, first_unit, 0, N, O, TRANSPOSED)
    store_bias_sums(up_bias_ptr, d_up_bias * unit, first_unit, N)
    store_bias_sums(gate_bias_ptr, d_gate_bias * unit, first_unit, N)


@gluon.jit(do_not_specialize=["stride_split", "N", "M", "up_step", "down_step", "splits"])
def _sm90_weight_gradient_kernel(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, seed_ptr,
    d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr,
    stride_split, N, M, up_step, down_step, splits,
    TRANSPOSED: gl.constexpr, CONFIG: gl.constexpr, ARITHMETIC: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = CONFIG.k
    O: gl.constexpr = CONFIG.o
    EVEN_M: gl.constexpr = CONFIG.even
    CONSUMERS: gl.constexpr = CONFIG.consumers
    program = gl.program_id(0)
    unit_tiles = gl.cdiv(N, HALF * CONSUMERS)
    number, batch = program % splits, program // splits // unit_tiles
    first_unit = (program // splits % unit_tiles) * (HALF * CONSUMERS)
    first_row, end_row = split_range(number, M, splits, x_desc.block_type.shape[0])
    products = make_products(
        x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, (N, M, up_step, down_step),
        False, CONFIG, ARITHMETIC, True,
    )  # fmt: skip
    # Gradients are dense, one batch entry after another. Offset here, pointers take no registers of the consumers.
    partial, entry = number.to(gl.int64) * stride_split, batch.to(gl.int64) * N
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
    gradients = (d_up_ptr, d_gate_ptr, d_down_ptr, d_up_bias_ptr, d_gate_bias_ptr)
    fence_async_shared()
    warp_specialize(
        CONSUMERS,
        _consume, (products, first_unit, first_row, end_row, gradients, K, O, EVEN_M, TRANSPOSED),
        _load, (products, batch, first_unit, first_row, end_row),
    )  # fmt: skip


def prepare_weight_gradient(
    operands: Operands, matrices: Matrices, split_size: int, transposed: bool, splits: int, config: Sm90Config
) -> Launch:
    """The launch of one pass over x and dy; its tensors are those of the generic kernel.

    ``transposed`` gradients have the layout of a batched GEMM-GEMM's operands.
    """
    batch, rows, width, hidden, out_width = operands.sizes()
    even = rows % config.block == 0 and (splits > 1 or batch > 1)
    compiled = config_of(operands, matrices, config.consumers, config.consumers, config.stages, even)
    return Launch(
        _sm90_weight_gradient_kernel,
        batch * config.row_tiles(hidden) * splits,
        (),
        (split_size, *sizes_of(operands, matrices), splits),
        (transposed, compiled, operands.arithmetic.sm90_constants),
        geometries=geometries(matrices, config.block, CONSUMER_ROWS, sm90_width(width), sm90_width(out_width)),
    )
