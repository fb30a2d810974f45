"""Device helpers that every kernel shares: which tile a program owns, bounds, loads and stores of tiles."""

from .device import tl, triton


@triton.jit
def follow_kernel_before(DEPENDENT: tl.constexpr):
    """For a kernel launched as dependent: waits for the results of the kernel before it, in the same stream.

    The programs of the kernel behind it may start as soon as all of this one run; they wait here, too.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def batch_and_tile(M, BLOCK_M: tl.constexpr):
    """(batch index, first row) of this program. One grid axis serves both: axes 1 and 2 end at 65,535 programs."""
    program = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    return (program // tiles).to(tl.int64), (program % tiles) * BLOCK_M


@triton.jit
def grouped_tile(tile, tile_rows, tile_columns, group):
    """(tile row, tile column) of the ``tile``-th tile, ``group`` rows of tiles at a time, each group by columns.

    Tiles that are computed at the same time lie close together, so that they find their operands in the cache.
    """
    first = tile // (group * tile_columns) * group
    height = tl.minimum(group, tile_rows - first)
    inside = tile - first * tile_columns
    return first + inside % height, inside // height


@triton.jit
def split_range(split, inner, splits, BLOCK_INNER: tl.constexpr):
    """(first, end) of one of ``splits`` ranges of whole blocks of the inner axis: split K."""
    size = tl.cdiv(tl.cdiv(inner, BLOCK_INNER), splits) * BLOCK_INNER
    first = split * size
    return first, tl.minimum(first + size, inner)


@triton.jit
def load_tile(
    base_ptr, rows, cols, stride_row, stride_col, row_limit, col_limit, EVEN_ROWS: tl.constexpr = False,
    EVEN_COLS: tl.constexpr = False,
):  # fmt: skip
    """The tile ``[rows, cols]`` of a matrix, zero outside ``row_limit × col_limit``. Offsets are 64-bit.

    An even axis has no tile that reaches past its limit.
    """
    offsets = rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col
    if EVEN_ROWS and EVEN_COLS:
        return tl.load(base_ptr + offsets)
    elif EVEN_ROWS:
        return tl.load(base_ptr + offsets, mask=(cols < col_limit)[None, :], other=0.0)
    elif EVEN_COLS:
        return tl.load(base_ptr + offsets, mask=(rows < row_limit)[:, None], other=0.0)
    else:
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
def only_before(values, cols, N, WHOLE: tl.constexpr):
    """A tile of a product for sums over its columns: zeros from N on, where any are unless tiles are ``WHOLE``.

    What lies there may be anything: copies of a stack of weights bring the next entry's, and infinity times 0 is NaN.
    """
    if not WHOLE:
        values = tl.where(tl.expand_dims(cols < N, 0), values, 0.0)
    return values


@triton.jit
def add_compensated(sums, lost, term):
    """(``sums + term``, what that rounds off), to be given with the next term: Kahan's summation.

    It loses as little as torch's sums do.
    """
    term -= lost
    longer = sums + term
    lost = (longer - sums) - term
    # Infinities leave no remainder: it would be NaN.
    return longer, tl.where(tl.abs(longer) < float("inf"), lost, 0.0)


_CHAIN = tl.constexpr(32)


@triton.jit
def _rounded_to_tf32(x):
    # The matrix unit cuts the bits it does not take; torch rounds them.
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _dot(left, right, acc, INPUT_PRECISION: tl.constexpr):
    if INPUT_PRECISION == "tf32" and left.dtype == tl.float32:
        left = _rounded_to_tf32(left)
        right = _rounded_to_tf32(right)
    return tl.dot(left, right, acc, input_precision=INPUT_PRECISION)


@triton.jit
def product(left, right, INPUT_PRECISION: tl.constexpr):
    """The matrix product of two tiles in float32.

    IEEE float32 is added up one product at a time: chains of 32 and their sum lose fewer bits than one chain.
    """
    ROWS: tl.constexpr = left.shape[0]
    INNER: tl.constexpr = left.shape[1]
    COLUMNS: tl.constexpr = right.shape[1]
    if left.dtype == tl.float32 and INPUT_PRECISION == "ieee" and INNER > _CHAIN:
        CHAINS: tl.constexpr = INNER // _CHAIN
        left = left.reshape(ROWS, CHAINS, _CHAIN).permute(1, 0, 2)
        right = right.reshape(CHAINS, _CHAIN, COLUMNS)
        return tl.sum(_dot(left, right, None, INPUT_PRECISION), 0)
    else:
        return _dot(left, right, None, INPUT_PRECISION)


@triton.jit
def add_product(acc, left, right, zero, INPUT_PRECISION: tl.constexpr):
    """``acc + left @ right``.

    A float32 tile is summed on its own before it joins the sum of the tiles: one long chain of additions would lose
    more bits than torch does. ``zero`` is a number the compiler does not know to be 0, or it would join them again.
    """
    if left.dtype == tl.float32:
        return acc + _dot(left, right, tl.zeros(acc.shape, tl.float32) + zero, INPUT_PRECISION)
    else:
        return _dot(left, right, acc, INPUT_PRECISION)


@triton.jit
def in_units(x, UNIT: tl.constexpr):
    """``x``, a multiple of ``UNIT``, as the compiler does not know of a stride or a limit unless 16 divides it.

    Without a whole vector between one row and the next, or up to the limit, it loads element by element.
    """
    return x // UNIT * UNIT


@triton.jit
def strides_in_units(strides, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr):
    """The three strides of an operand, batch, row and column, whose lines are whole vectors (``launching.lines``)."""
    stride_z, stride_row, stride_col = strides
    if TRANSPOSED:
        return in_units(stride_z, UNIT), stride_row, in_units(stride_col, UNIT)
    else:
        return in_units(stride_z, UNIT), in_units(stride_row, UNIT), stride_col
