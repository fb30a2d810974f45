"""What the kernels of two products share: rings of their operands, and the hidden between both products.

The left operand of the second product is computed from the accumulator of the first one, in registers.
"""

from typing import Any

from ...hopper import Geometry, gl, gluon, resources, warpgroup_mma
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, operand_ring, ring_beside
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
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, sizes, PIPELINE: gl.constexpr,
    EVEN_N: gl.constexpr, HOW: gl.constexpr, WEIGHTS_STAY: gl.constexpr = False,
):  # fmt: skip
    """``sizes`` and ``HOW`` are those of :func:`sizes_and_how`; ``PIPELINE`` has consumers, stages of weights, of rows.

    Consumers have stages of their own for rows and share those of weights, or the reverse where weights stay.
    """
    N, M, up_step, down_step = sizes
    CONSUMERS: gl.constexpr = PIPELINE[0]
    STAGES: gl.constexpr = PIPELINE[1]
    SHARED: gl.constexpr = 0 if WEIGHTS_STAY else CONSUMERS
    x = operand_ring(x_desc, M, False, PIPELINE[2], CONSUMERS if WEIGHTS_STAY else 1)
    up = operand_ring(up_desc, up_step, HOW[0], STAGES, SHARED)
    dy = None
    gate = None
    # Bytes that fill a stage of rows, and one of up's.
    ROW_BYTES: gl.constexpr = x_desc.block_type.nbytes + (0 if dy_desc is None else dy_desc.block_type.nbytes)
    UP_BYTES: gl.constexpr = up_desc.block_type.nbytes * (1 if gate_desc is None else 2)
    if gate_desc is not None:
        gate = ring_beside(up, gate_desc, up_step, HOW[0])
    if dy_desc is None:
        down = operand_ring(down_desc, down_step, HOW[1], STAGES, SHARED)
    else:
        dy = ring_beside(x, dy_desc, M, False)
        down = ring_beside(up, down_desc, down_step, HOW[1])
    return Products(
        x=x, dy=dy, up=up, gate=gate, down=down, up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr, N=N,
        UNITS=up_desc.block_type.shape[1] if HOW[0] else up_desc.block_type.shape[0], CONSUMERS=CONSUMERS,
        ROW_BYTES=ROW_BYTES, UP_BYTES=UP_BYTES if dy_desc is None else UP_BYTES + down_desc.block_type.nbytes,
        EVEN_N=EVEN_N, ACTIVATION=HOW[2], ACCURACY=HOW[3],
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
def add_product(values, right, acc):
    """Starts ``values right + acc``, the values in the registers where a product has its left operand."""
    layout: gl.constexpr = gl.DotOperandLayout(0, zeros(HALF, right.shape[1]).type.layout, 2)
    return warpgroup_mma(gl.convert_layout(values.to(right.dtype), layout), right, acc, is_async=True)


def sizes_and_how(operands: Operands, matrices: Matrices) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """What kernels are told of their operands: N, M, and the rows between the entries of a batch of up and of down.

    And at compile time: whether up and down lie transposed, as they are multiplied, the activation and its accuracy.
    """
    how = operands.arithmetic
    sizes = operands.up.shape[-2], operands.x.shape[-2], matrices.up.step, matrices.down.step
    return sizes, (matrices.up.transposed, not matrices.down.transposed, how.activation, how.accuracy)


def geometries(matrices: Matrices, rows: int, units: int, width: int, out_width: int) -> tuple[Geometry | None, ...]:
    """Blocks of x and, where it is there, of dy, and of up, gate and down."""
    return (
        matrices.x.geometry(rows, width),
        *(() if matrices.beside is None else (matrices.beside.geometry(rows, out_width),)),
        matrices.up.geometry(units, width),
        None if matrices.gate is None else matrices.gate.geometry(units, width),
        matrices.down.geometry(out_width, units),
    )
