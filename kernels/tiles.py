"""Device helpers that every kernel shares: which tile a program owns, bounds, loads and stores of tiles."""

from .device import tl, triton


@triton.jit
def batch_and_tile(M, BLOCK_M: tl.constexpr):
    """(batch index, first row) of this program. One grid axis serves both: axes 1 and 2 end at 65,535 programs."""
    program = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    return (program // tiles).to(tl.int64), (program % tiles) * BLOCK_M


@triton.jit
def load_tile(base_ptr, rows, cols, stride_row, stride_col, row_limit, col_limit):
    """The tile ``[rows, cols]`` of a matrix, zero outside ``row_limit × col_limit``. Offsets are 64-bit."""
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    inside = (rows < row_limit)[:, None] & (cols < col_limit)[None, :]
    return tl.load(base_ptr + offsets, mask=inside, other=0.0)


@triton.jit
def store_tile(base_ptr, tile, rows, cols, stride_row, stride_col, row_limit, col_limit):
    """Writes a float32 tile rounded once to the matrix's dtype; nothing outside the limits is touched."""
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    inside = (rows < row_limit)[:, None] & (cols < col_limit)[None, :]
    tl.store(base_ptr + offsets, tile.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(base_ptr, cols, stride, col_limit):
    """A slice of a bias in float32, zero outside its length."""
    return tl.load(base_ptr + cols.to(tl.int64) * stride, mask=cols < col_limit, other=0.0).to(tl.float32)


@triton.jit
def _rounded_to_tf32(x):
    # The matrix unit cuts the bits it does not take; torch rounds them.
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(left, right, INPUT_PRECISION: tl.constexpr):
    """The matrix product of two tiles in float32."""
    if INPUT_PRECISION == "tf32" and left.dtype == tl.float32:
        return tl.dot(_rounded_to_tf32(left), _rounded_to_tf32(right), input_precision=INPUT_PRECISION)
    else:
        return tl.dot(left, right, input_precision=INPUT_PRECISION)


@triton.jit
def add_product(acc, left, right, zero, INPUT_PRECISION: tl.constexpr):
    """``acc + left @ right``.

    A float32 tile is summed on its own before it joins the sum of the tiles: one long chain of additions would lose
    more bits than torch does. ``zero`` is a number the compiler does not know to be 0, or it would join them again.
    """
    if left.dtype == tl.float32:
        start = tl.zeros(acc.shape, tl.float32) + zero
        if INPUT_PRECISION == "tf32":
            left = _rounded_to_tf32(left)
            right = _rounded_to_tf32(right)
        return acc + tl.dot(left, right, start, input_precision=INPUT_PRECISION)
    else:
        return tl.dot(left, right, acc, input_precision=INPUT_PRECISION)
