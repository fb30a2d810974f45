"""The mainloop of two products: rings of the operands, and the hidden between the products.

The left operand of the second product is computed from the accumulator of the first, in registers.
"""

from typing import NamedTuple

from ...hopper import Geometry, Resource, gl, gluon, resources, warpgroup_mma
from ...matmul.sm90.elements import zeros
from ...matmul.sm90.loading import load_block, rows_first
from ...matmul.sm90.ring import HALF, operand_ring, ring_beside
from ..operands import Matrices, Operands


@resources("x dy up gate down up_bias_ptr gate_bias_ptr N UNITS CONSUMERS ROW_BYTES UP_BYTES EVEN_N ARITHMETIC")
class Products(Resource):
    """The operands of both products, as rings, and the arithmetic of the ``N`` hidden units between them.

    A stage of x, and of dy in the backward pass, has rows; a stage of a weight has a block of ``UNITS`` hidden units. x
    and dy share their stages, and so do the weights; but without dy, down has stages of its own. Absent operands are
    None. ``EVEN_N``: the last block of hidden units is whole.
    """


class Config(NamedTuple):
    """What a kernel is compiled for: widths, consumers, the stages of the rings of weights and of rows, and layouts.

    ``even``: the axis that the kernel loops over is a whole number of blocks. Up and down may be multiplied transposed.
    """

    k: int
    o: int
    consumers: int
    stages: int
    row_stages: int
    even: bool
    up_transposed: bool
    down_transposed: bool


@gluon.jit
def make_products(
    x_desc, dy_desc, up_desc, gate_desc, down_desc, up_bias_ptr, gate_bias_ptr, sizes, EVEN_N: gl.constexpr,
    CONFIG: gl.constexpr, ARITHMETIC: gl.constexpr, WEIGHTS_STAY: gl.constexpr = False,
):  # fmt: skip
    """``sizes`` are N, M, and the rows between two batch entries of up and of down.

    Each consumer has its own stages for rows, and all share those of weights; if weights stay, the reverse.
    """
    N, M, up_step, down_step = sizes
    CONSUMERS: gl.constexpr = CONFIG.consumers
    STAGES: gl.constexpr = CONFIG.stages
    SHARED: gl.constexpr = 0 if WEIGHTS_STAY else CONSUMERS
    x = operand_ring(x_desc, M, False, CONFIG.row_stages, CONSUMERS if WEIGHTS_STAY else 1)
    up = operand_ring(up_desc, up_step, CONFIG.up_transposed, STAGES, SHARED)
    dy = None
    gate = None
    # The bytes of a stage of rows, and of a stage of up.
    ROW_BYTES: gl.constexpr = x_desc.block_type.nbytes + (0 if dy_desc is None else dy_desc.block_type.nbytes)
    UP_BYTES: gl.constexpr = up_desc.block_type.nbytes * (1 if gate_desc is None else 2)
    UNITS: gl.constexpr = up_desc.block_type.shape[1] if CONFIG.up_transposed else up_desc.block_type.shape[0]
    if gate_desc is not None:
        gate = ring_beside(up, gate_desc, up_step, CONFIG.up_transposed)
    if dy_desc is None:
        down = operand_ring(down_desc, down_step, CONFIG.down_transposed, STAGES, SHARED)
    else:
        dy = ring_beside(x, dy_desc, M, False)
        down = ring_beside(up, down_desc, down_step, CONFIG.down_transposed)
    return Products(
        x=x, dy=dy, up=up, gate=gate, down=down, up_bias_ptr=up_bias_ptr, gate_bias_ptr=gate_bias_ptr, N=N,
        UNITS=UNITS, CONSUMERS=CONSUMERS,
        ROW_BYTES=ROW_BYTES, UP_BYTES=UP_BYTES if dy_desc is None else UP_BYTES + down_desc.block_type.nbytes,
        EVEN_N=EVEN_N, ARITHMETIC=ARITHMETIC,
    )  # fmt: skip


@gluon.jit
def load_rows(products, batch, row, full, stage):
    """Start the copies of rows of x, and of dy."""
    load_block(products.x, batch * products.x.step, row, full, stage)
    if products.dy is not None:
        load_block(products.dy, batch * products.x.step, row, full, stage)


@gluon.jit
def load_units(products, batch, n, full, stage):
    """Start the copies of the hidden units from ``n`` on, of all weights that share a stage."""
    if products.gate is not None:
        load_block(products.gate, batch * products.up.step, n, full, stage)
    load_block(products.up, batch * products.up.step, n, full, stage)
    if products.dy is not None:
        load_block(products.down, batch * products.down.step, n, full, stage)


@gluon.jit
def start_product(left, right, bias):
    """Start ``left rightᵀ + bias``. The bias initialises the accumulator, so adding it costs nothing."""
    acc = zeros(left.shape[0], right.shape[0])
    if bias is not None:
        acc += bias
    return warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=bias is not None, is_async=True)


@gluon.jit
def start_pre_activations(x_tile, ring, bias_ptr, stage, n, products):
    """Start ``x Wᵀ + bias`` for the hidden units from ``n`` on, with W in a stage of the ring."""
    if bias_ptr is None:
        return start_product(x_tile, rows_first(ring, stage), None)
    else:
        units = n + gl.arange(0, products.UNITS, gl.SliceLayout(0, zeros(HALF, products.UNITS).type.layout))
        if products.EVEN_N:
            bias = gl.load(bias_ptr + units)
        else:
            # TMA requires N to be a multiple of 8; the hint lets the compiler load two columns at once.
            bias = gl.load(bias_ptr + units, mask=units < products.N // 8 * 8, other=0.0)
        return start_product(x_tile, rows_first(ring, stage), gl.expand_dims(bias.to(gl.float32), 0))


@gluon.jit
def add_product(values, right, acc):
    """Start ``values right + acc`` with the values as the left operand, in registers."""
    layout: gl.constexpr = gl.DotOperandLayout(0, zeros(HALF, right.shape[1]).type.layout, 2)
    return warpgroup_mma(gl.convert_layout(values.to(right.dtype), layout), right, acc, is_async=True)


def sizes_of(operands: Operands, matrices: Matrices) -> tuple[int, int, int, int]:
    """The ``sizes`` of :func:`make_products`."""
    return operands.up.shape[-2], operands.x.shape[-2], matrices.up.step, matrices.down.step


def config_of(
    operands: Operands, matrices: Matrices, consumers: int, stages: int, row_stages: int, even: bool
) -> Config:
    """The :class:`Config` for operands of these layouts: down is multiplied as ``[N, O]``."""
    _, _, width, _, out_width = operands.sizes()
    transposed = matrices.up.transposed, not matrices.down.transposed
    return Config(width, out_width, consumers, stages, row_stages, even, *transposed)


def geometries(matrices: Matrices, rows: int, units: int, width: int, out_width: int) -> tuple[Geometry | None, ...]:
    """The geometries of x, of dy if there is one, and of up, gate and down."""
    return (
        matrices.x.geometry(rows, width),
        *(() if matrices.beside is None else (matrices.beside.geometry(rows, out_width),)),
        matrices.up.geometry(units, width),
        None if matrices.gate is None else matrices.gate.geometry(units, width),
        matrices.down.geometry(out_width, units),
    )
