"""Device helpers that kernels share: which tile a program owns, bounds, loads, stores and products of tiles."""

from .device import tl, triton


@triton.jit
def wait_for_previous_grid(DEPENDENT: tl.constexpr):
    """In a dependent launch (PDL), wait for the results of the previous kernel in the stream.

    The next kernel, if dependent, may start once all programs of this one have reached this call, where it waits, too.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def batch_and_tile(M, BLOCK_M: tl.constexpr):
    """(batch index, first row) of this program. One grid axis serves both: axes 1 and 2 are limited to 65,535."""
    program = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    return (program // tiles).to(tl.int64), (program % tiles) * BLOCK_M


@triton.jit
def grouped_tile(tile, tile_rows, tile_columns, group):
    """(tile row, tile column) of the ``tile``-th tile, swizzled: ``group`` tile rows at a time, column by column.

    Tiles that are computed at the same time are close together and share operands in the L2 cache.
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
    """A product's tile with zeros from column N on, for sums over columns; ``WHOLE``: no tile extends past N.

    Those columns may hold anything: TMA reads the next entry of stacked weights there, and infinity times 0 is NaN.
    """
    if not WHOLE:
        values = tl.where(tl.expand_dims(cols < N, 0), values, 0.0)
    return values


@triton.jit
def add_compensated(sums, lost, term):
    """(``sums + term``, its rounding error), which the next call takes as ``lost``: Kahan's summation.

    It is as accurate as torch's sums.
    """
    term -= lost
    longer = sums + term
    lost = (longer - sums) - term
    # Infinities leave no remainder: it would be NaN.
    return longer, tl.where(tl.abs(longer) < float("inf"), lost, 0.0)


_CHAIN = tl.constexpr(32)


@triton.jit
def _rounded_to_tf32(x):
    # Tensor cores truncate to TF32; torch rounds.
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

    IEEE float32 is accumulated one FMA at a time: the sum of chains of 32 loses fewer bits than one long chain.
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

    A float32 tile is summed separately before it is added to ``acc``: one long chain of additions would lose more bits
    than torch does. ``zero`` is 0 at run time only; with a constant the compiler would merge the two sums again.
    """
    if left.dtype == tl.float32:
        return acc + _dot(left, right, tl.zeros(acc.shape, tl.float32) + zero, INPUT_PRECISION)
    else:
        return _dot(left, right, acc, INPUT_PRECISION)


@triton.jit
def assume_multiple(x, UNIT: tl.constexpr):
    """Tell the compiler that the stride or limit ``x`` is a multiple of ``UNIT``: an alignment hint.

    Triton derives one itself only for multiples of 16. Without it, loads and stores are not vectorised.
    """
    return x // UNIT * UNIT


@triton.jit
def assume_aligned(strides, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr):
    """(batch, row, column) strides of an operand, with that hint on those between ``launching.lines``."""
    stride_z, stride_row, stride_col = strides
    if TRANSPOSED:
        return assume_multiple(stride_z, UNIT), stride_row, assume_multiple(stride_col, UNIT)
    else:
        return assume_multiple(stride_z, UNIT), assume_multiple(stride_row, UNIT), stride_col


@triton.jit
def inverse(x):
    """1 / x, rounded once; the inverse of a power of two is exact."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, x)
