"""One row times the rows of the right operand, by multiply-adds: memory is all that such a product waits for."""

from ..device import tl, triton
from ..tiles import follow_kernel_before, in_units, load_tile, load_vector, strides_in_units
from .tiles_product import finish


@triton.jit(do_not_specialize=["splits"])
def row_product_kernel(
    left_ptr, right_ptr, bias_ptr, out_ptr,
    stride_lk, stride_rn, stride_rk, stride_b, N, K, splits,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTIAL: tl.constexpr, ATOMIC: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow_kernel_before(DEPENDENT)
    K = in_units(K, UNIT)
    _, stride_rn, stride_rk = strides_in_units(0, stride_rn, stride_rk, RIGHT_TRANSPOSED, UNIT)
    if RIGHT_TRANSPOSED:
        N = in_units(N, UNIT)
    tiles = tl.cdiv(N, BLOCK_N)
    split = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    split_size = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    first = split * split_size
    for start in tl.range(first, tl.minimum(first + split_size, K), BLOCK_K):
        right = load_tile(right_ptr, cols, start + inner, stride_rn, stride_rk, N, K)
        left = load_vector(left_ptr, start + inner, stride_lk, K)
        sums += right.to(tl.float32) * left[None, :]
    acc = tl.sum(sums, 1)[None, :]
    rows = tl.arange(0, 1)
    finish(out_ptr, acc, bias_ptr, rows, cols, stride_b, N, 1, split, PARTIAL, ATOMIC, ACTIVATION, ACCURACY)
