"""Shared parts of prologues and epilogues on Hopper: initial accumulators with a bias, scales, and dropout."""

from ...dropout import LANES as DRAWN_LANES
from ...dropout import above, swapped, words
from ...hopper import Resource, gl, gluon, resources
from .ring import HALF, TILE, column_halves

LANES = gl.constexpr(DRAWN_LANES)


@resources("rows_ptr columns_ptr gate_ptr rows ROW_STRIDE COLUMN_STRIDE")
class Scales(Resource):
    """Float32 scales of the rows and columns of a product of 8-bit values; none if ``rows_ptr`` is None.

    A single scale for all ``rows`` has a ``ROW_STRIDE`` of 0, one for all columns a ``COLUMN_STRIDE`` of 0. If the
    result is in 8 bits, too, scales are the upper halves of words of 32 bits, as bfloat16, and the lower halves what
    the result is multiplied by: see ``kernels.bounds``.
    """


@gluon.jit
def upper(word):
    """The upper half of a word as float32; numbers that are no words stay."""
    if word.dtype == gl.int32:
        return (word & -65536).to(gl.float32, bitcast=True)
    else:
        return word


@gluon.jit
def lower(word):
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def of_rows(ptr, row, M, STRIDE: gl.constexpr, BITS: gl.constexpr):
    """The numbers of a quarter's rows, for a product of operands of ``BITS`` bits; 0 if there are none."""
    if ptr is None:
        return 0
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 256 // BITS])
        rows = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        return gl.load(ptr + gl.minimum(rows, M - 1) * STRIDE)


@gluon.jit
def row_scales_of_tile(scales, row):
    """The scales of the upper and of the lower rows of a tile of an 8-bit product, to be loaded during its mainloop.

    An epilogue has too few registers to do anything else while it waits for them.
    """
    upper_rows = of_rows(scales.rows_ptr, row, scales.rows, scales.ROW_STRIDE, 8)
    return upper_rows, of_rows(scales.rows_ptr, row + HALF, scales.rows, scales.ROW_STRIDE, 8)


@gluon.jit
def of_columns(ptr, column, N, layout: gl.constexpr):
    """The numbers of a quarter's columns, 0 past N."""
    cols = column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    return gl.load(ptr + cols, cols < N, 0)


@gluon.jit
def in_8_bits(values, factors_of_rows, factors_of_columns):
    """Part of a tile, times factors of its rows and columns, in e4m3."""
    values *= gl.expand_dims(factors_of_rows, 1)
    return (values * gl.expand_dims(factors_of_columns, 0)).to(gl.float8e4nv)


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, BITS: gl.constexpr = 16):
    """A zero accumulator in the wgmma layout for operands of ``BITS`` bits."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def packed(left, right):
    """Two sums that wait, rounded to bfloat16, side by side in 32 bits: there are no registers for more."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def plus_packed(acc, packed):
    """The left and the right half of the accumulators, plus two packed halves."""
    left, right = column_halves(acc)
    left += (packed << 16).to(gl.float32, bitcast=True)
    right += (packed & -65536).to(gl.float32, bitcast=True)
    return left, right


@gluon.jit
def scaled(acc, row_scales, column, scales, columns_ptr, bias_ptr, first, N):
    """``acc``, part of a tile of an 8-bit product, times the scales of its rows and columns, plus any bias.

    The initial accumulator, which is scaled, cannot hold the bias. Bias and scales of ``N`` columns begin at ``first``.
    """
    cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    inside = cols < N - column
    cols += first + column
    # Masked, not clamped: each clamped column would need an address of its own, in two registers.
    of_columns = gl.load(columns_ptr + cols * scales.COLUMN_STRIDE, inside, 0)
    acc = acc * gl.expand_dims(upper(row_scales), 1) * gl.expand_dims(upper(of_columns), 0)
    if bias_ptr is not None:
        acc += gl.expand_dims(gl.load(bias_ptr + cols, inside, 0.0).to(gl.float32), 0)
    return acc


@gluon.jit
def bias_of_columns(bias_ptr, first, column, N, COLUMNS: gl.constexpr):
    """An accumulator that is initialised with the bias, whose ``N`` columns begin at ``first``, or with zeros."""
    acc = zeros(HALF, COLUMNS)
    if bias_ptr is not None:
        cols = gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        acc += gl.expand_dims(gl.load(bias_ptr + first + gl.minimum(column + cols, N - 1)).to(gl.float32), 0)
    return acc


@gluon.jit
def biases_of_halves(up_bias_ptr, gate_bias_ptr, first, column, N):
    """The same for a gated hidden: the second half of the tile's columns belongs to the gate."""
    acc = zeros(HALF, TILE)
    cols = gl.arange(0, TILE, gl.SliceLayout(0, acc.type.layout))
    inside = first + gl.minimum(column + cols % HALF, N - 1)
    if up_bias_ptr is not None and gate_bias_ptr is not None:
        bias = gl.load(gl.where(cols < HALF, up_bias_ptr + inside, gate_bias_ptr + inside)).to(gl.float32)
        acc += gl.expand_dims(bias, 0)
    elif up_bias_ptr is not None:
        acc += gl.expand_dims(gl.where(cols < HALF, gl.load(up_bias_ptr + inside).to(gl.float32), 0.0), 0)
    elif gate_bias_ptr is not None:
        acc += gl.expand_dims(gl.where(cols < HALF, 0.0, gl.load(gate_bias_ptr + inside).to(gl.float32)), 0)
    return acc


@gluon.jit
def draw(dropout, row, column, layout: gl.constexpr):
    """Which elements of a quarter of a tile are kept: boolean, in ``layout``, without exchange between threads."""
    # A thread has two of eight columns in this layout, and the same two of every eight in that of the tile.
    lanes: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    rows = row + dropout.row + gl.arange(0, HALF, gl.SliceLayout(1, lanes))
    draws = (column + dropout.column) // HALF * LANES + gl.arange(0, LANES, gl.SliceLayout(0, lanes))
    first, second, third, fourth = words(
        gl.load(dropout.seed_ptr), gl.expand_dims(rows, 1).to(gl.int64), gl.expand_dims(draws, 0)
    )
    left = gl.join(gl.join(swapped(first), first), gl.join(swapped(second), second))
    right = gl.join(gl.join(swapped(third), third), gl.join(swapped(fourth), fourth))
    # [rows, lanes, half, word % 2, word // 2] -> [rows, columns].
    drawn = gl.join(left, right).permute((0, 4, 3, 2, 1)).reshape([HALF, HALF])
    return above(gl.convert_layout(drawn, layout, assert_trivial=True), dropout.limit)


@gluon.jit
def dropped(values, kept, dropout):
    """The values of a tile times the scale where they are ``kept``, else times 0."""
    # Select the factor: to select 16-bit results the compiler would unpack their pairs and pack them again.
    return values * gl.where(kept, dropout.scale, 0.0)
