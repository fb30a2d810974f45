"""What the mainloops of two products share: rings of both operands, their load warp, and the hidden between products.

The left operand of the second product is computed from the accumulator of the first one, in registers.
"""

from typing import Any

from ...activations import through_activation
from ...hopper import Geometry, Matrix, gl, gluon, mbarrier, resources, warpgroup_mma, warpgroup_mma_wait
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, acquire, operand_ring, ring_beside, stage_of, wait_full
from ...matmul.sm90.schedules import rows_at
from ..operands import Matrices, Operands


@resources
class Products:
    """The operands of both products, as rings, and how the ``N`` hidden units between them are computed.

    x, and dy in the backward pass, come in rows; of the weights a block has ``UNITS`` hidden units. x and dy share
    their stages, and so do the weights; but without dy, down has stages of its own. Whatever is not read is None.
    ``EVEN_N`` says that the last block of hidden units is whole.
    """

    x: Any
    dy: Any
    up: Any
    gate: Any
    down: Any
    up_bias_ptr: Any
    gate_bias_ptr: Any
    N: Any
    UNITS: Any
    CONSUMERS: Any
    ROW_BYTES: Any
    UP_BYTES: Any
    EVEN_N: Any
    ACTIVATION: Any
    ACCURACY: Any


@gluon.jit
def make_products(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, N, M, up_step, down_step,
    ROW_STAGES: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EVEN_N: gl.constexpr,
    UP_TRANSPOSED: gl.constexpr, DOWN_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, ACCURACY: gl.constexpr,
    WEIGHTS_STAY: gl.constexpr = False,
):  # fmt: skip
    """Consumers have stages of their own for rows and share those of weights, or the reverse where weights stay."""
    SHARED: gl.constexpr = 0 if WEIGHTS_STAY else CONSUMERS
    x = operand_ring(x_desc, M, False, ROW_STAGES, CONSUMERS if WEIGHTS_STAY else 1)
    up = operand_ring(up_desc, up_step, UP_TRANSPOSED, STAGES, SHARED)
    dy = None
    gate = None
    # Bytes that fill a stage of rows, and one of up's.
    ROW_BYTES: gl.constexpr = x_desc.block_type.nbytes + (0 if dy_desc is None else dy_desc.block_type.nbytes)
    UP_BYTES: gl.constexpr = up_desc.block_type.nbytes * (1 if gate_desc is None else 2)
    if gate_desc is not None:
        gate = ring_beside(up, gate_desc, up_step, UP_TRANSPOSED)
    if dy_desc is None:
        down = operand_ring(down_desc, down_step, DOWN_TRANSPOSED, STAGES, SHARED)
    else:
        dy = ring_beside(x, dy_desc, M, False)
        down = ring_beside(up, down_desc, down_step, DOWN_TRANSPOSED)
    return Products(
        x=x, dy=dy, up=up, gate=gate, down=down, up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr, N=N,
        UNITS=up_desc.block_type.shape[1] if UP_TRANSPOSED else up_desc.block_type.shape[0], CONSUMERS=CONSUMERS,
        ROW_BYTES=ROW_BYTES, UP_BYTES=UP_BYTES if dy_desc is None else UP_BYTES + down_desc.block_type.nbytes,
        EVEN_N=EVEN_N, ACTIVATION=ACTIVATION, ACCURACY=ACCURACY,
    )  # fmt: skip


@gluon.jit
def load_rows(products, batch, row, full, stage):
    """Starts the copies of rows of x, and of dy."""
    load_block(products.x, batch * products.x.step, row, full, stage)
    if products.dy is not None:
        load_block(products.dy, batch * products.x.step, row, full, stage)


@gluon.jit
def load_units(products, batch, n, full, stage):
    """Starts the copies of the hidden units from ``n`` on, of all weights that share a stage."""
    if products.gate is not None:
        load_block(products.gate, batch * products.up.step, n, full, stage)
    load_block(products.up, batch * products.up.step, n, full, stage)
    if products.dy is not None:
        load_block(products.down, batch * products.down.step, n, full, stage)


@gluon.jit
def row_stage(consumer: gl.constexpr, turn, products):
    """(stage, phase of its full barrier) of a consumer's rows of the ``turn``-th tile."""
    stage, phase = stage_of(turn, products.x.STAGES // products.CONSUMERS)
    return stage * products.CONSUMERS + consumer, phase


@gluon.jit
def load_tiles(products, schedule):
    """The load warp: for one tile after another, the rows of each consumer, and all hidden units."""
    position = 0
    turn = 0
    for index in range(gl.program_id(0), schedule.tiles, gl.num_programs(0)):
        batch, row = rows_at(schedule, index)
        for consumer in gl.static_range(products.CONSUMERS):
            stage, phase = row_stage(consumer, turn, products)
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
def start_product(left, right, bias):
    """Starts ``left rightᵀ + bias``; the sum begins with the bias, so that adding it costs nothing."""
    acc = zeros(left.shape[0], right.shape[0])
    if bias is not None:
        acc += bias
    return warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=bias is not None, is_async=True)


@gluon.jit
def start_pre_activations(x_tile, ring, bias_ptr, stage, n, products):
    """Starts ``x Wᵀ + bias`` for the hidden units from ``n`` on, W in a stage of the ring."""
    if bias_ptr is None:
        return start_product(x_tile, rows_first(ring, stage), None)
    else:
        units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, zeros(HALF, products.UNITS).type.layout))
        if products.EVEN_N:
            bias = gl.load(bias_ptr + units)
        else:
            # N is a multiple of 8, as copies need it: said here, two columns are loaded at once.
            bias = gl.load(bias_ptr + units, mask=units < products.N // 8 * 8, other=0.0)
        return start_product(x_tile, rows_first(ring, stage), gl.expand_dims(bias.to(gl.float32), 0))


@gluon.jit
def multiply_twice(acc, tiles, position, products, first: gl.constexpr, second: gl.constexpr):
    """(``acc`` and the second product of all hidden units, the position behind these in the rings of the weights).

    ``first(acc, tiles, stage, n, products)`` gives ``acc``, once it is complete, and the first products of a block
    of units; ``second(acc, block, n, position, products, EVEN_N)`` starts the sum of ``acc`` and their second
    product.
    """
    stage = wait_full(products.up, position)
    acc, block = first(acc, tiles, stage, 0, products)
    if products.dy is None:
        mbarrier.arrive(products.up.empty.index(stage))
    for n in range(products.UNITS, products.N, products.UNITS):
        # Only the last block can reach past N.
        acc = second(acc, block, n - products.UNITS, position, products, True)
        done = stage
        position += 1
        stage = wait_full(products.up, position)
        # The next first products are under way together with this block's second one.
        acc, block = first(acc, tiles, stage, n, products)
        mbarrier.arrive(products.down.empty.index(done))
        if products.dy is None:
            mbarrier.arrive(products.up.empty.index(stage))
    last = (gl.cdiv(products.N, products.UNITS) - 1) * products.UNITS
    acc = second(acc, block, last, position, products, products.EVEN_N)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(products.down.empty.index(stage))
    return acc, position + 1


@gluon.jit
def left_operand(values, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """Values in the registers where a product of so many columns has its left operand."""
    return gl.convert_layout(values.to(DTYPE), gl.DotOperandLayout(0, zeros(HALF, COLUMNS).type.layout, 2))


@gluon.jit
def add_product(values, right, acc):
    """Starts ``values right + acc``."""
    return warpgroup_mma(left_operand(values, right.shape[1], right.dtype), right, acc, is_async=True)


@gluon.jit
def up_gradient(d_hidden, slope, z, GATED: gl.constexpr, ACTIVATION: gl.constexpr):
    """dZ from dH. With a gate, z is but a factor of the hidden: its slope is the activation of the gate."""
    if GATED:
        return d_hidden * slope
    else:
        return through_activation(d_hidden, slope, z, ACTIVATION)


@resources
class Gradients:
    """Where the gradients of the weights and biases go, None for those that nobody wants.

    Gradients are dense, one batch entry behind the other. ``TRANSPOSED`` ones lie as operands of a batched GEMM-GEMM.
    """

    up_ptr: Any
    gate_ptr: Any
    down_ptr: Any
    up_bias_ptr: Any
    gate_bias_ptr: Any
    down_bias_ptr: Any
    K: Any
    O: Any
    TRANSPOSED: Any


@gluon.jit
def make_gradients(
    up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, down_bias_ptr, partial, first_unit, K: gl.constexpr,
    O: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The gradients of a batch entry whose units are ``first_unit`` and later ones, in a split ``partial`` behind."""
    if up_ptr is not None:
        up_ptr += partial + first_unit * K
    if gate_ptr is not None:
        gate_ptr += partial + first_unit * K
    if down_ptr is not None:
        down_ptr += partial + first_unit * O
    if up_bias_ptr is not None:
        up_bias_ptr += partial + first_unit
    if gate_bias_ptr is not None:
        gate_bias_ptr += partial + first_unit
    if down_bias_ptr is not None:
        down_bias_ptr += partial
    return Gradients(
        up_ptr=up_ptr, gate_ptr=gate_ptr, down_ptr=down_ptr, up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr,
        down_bias_ptr=down_bias_ptr, K=K, O=O, TRANSPOSED=TRANSPOSED,
    )  # fmt: skip


def geometries(
    matrices: Matrices, dy: Matrix | None, rows: int, units: int, width: int, out_width: int
) -> tuple[Geometry | None, ...]:
    """Blocks of x and, where it is given, of dy, and of up, gate and down."""
    return (
        matrices.x.geometry(rows, width),
        *(() if dy is None else (dy.geometry(rows, out_width),)),
        matrices.up.geometry(units, width),
        None if matrices.gate is None else matrices.gate.geometry(units, width),
        matrices.down.geometry(out_width, units),
    )


def last_constants(operands: Operands, matrices: Matrices) -> tuple[object, ...]:
    """``UP_TRANSPOSED, DOWN_TRANSPOSED, ACTIVATION, ACCURACY``."""
    how = operands.arithmetic
    return matrices.up.transposed, not matrices.down.transposed, how.activation, how.accuracy
