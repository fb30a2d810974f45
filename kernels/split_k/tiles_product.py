"""A range of the inner axis for one tile of the result, on the matrix units."""

from ..activations import activated
from ..device import tl, triton
from ..tiles import add_product, follow_kernel_before, in_units, load_tile, load_vector, strides_in_units


@triton.jit
def finish(
    out_ptr, acc, bias_ptr, rows, cols, stride_b, N, M, split,
    PARTIAL: tl.constexpr, ATOMIC: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
):  # fmt: skip
    """Stores a tile: what the product is, with the epilogue, or the partial of a split, without it."""
    offsets = rows.to(tl.int64)[:, None] * N + cols.to(tl.int64)[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if ATOMIC:
        tl.atomic_add(out_ptr + offsets, acc, mask=inside, sem="relaxed")
    elif PARTIAL:
        tl.store(out_ptr + split.to(tl.int64) * M * N + offsets, acc, mask=inside)
    else:
        if bias_ptr is not None:
            acc += load_vector(bias_ptr, cols, stride_b, N)[None, :]
        if ACTIVATION != "identity":
            acc = activated(acc, ACTIVATION, ACCURACY)
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "splits", "zero"])
def tiles_product_kernel(
    left_ptr, right_ptr, bias_ptr, out_ptr,
    stride_lm, stride_lk, stride_rn, stride_rk, stride_b, N, K, M, splits, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
    PARTIAL: tl.constexpr, ATOMIC: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, RIGHT_TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # The result is dense. ``zero`` is 0, which only the caller knows.
    follow_kernel_before(DEPENDENT)
    K, stride_lm = in_units(K, UNIT), in_units(stride_lm, UNIT)
    _, stride_rn, stride_rk = strides_in_units(0, stride_rn, stride_rk, RIGHT_TRANSPOSED, UNIT)
    if RIGHT_TRANSPOSED:
        N = in_units(N, UNIT)
    row_tiles = tl.cdiv(M, BLOCK_M)
    tiles = row_tiles * tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    rows = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # With the smaller side second, the larger one fills the rows of a matrix instruction.
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    split_size = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    first = split * split_size
    for start in tl.range(first, tl.minimum(first + split_size, K), BLOCK_K):
        left = load_tile(left_ptr, rows, start + inner, stride_lm, stride_lk, M, K)
        right = load_tile(right_ptr, cols, start + inner, stride_rn, stride_rk, N, K)
        if SWAPPED:
            acc = add_product(acc, right, left.T, zero, INPUT_PRECISION)
        else:
            acc = add_product(acc, left, right.T, zero, INPUT_PRECISION)
    if SWAPPED:
        acc = acc.T
    finish(out_ptr, acc, bias_ptr, rows, cols, stride_b, N, M, split, PARTIAL, ATOMIC, ACTIVATION, ACCURACY)
