"""One row times the rows of the right operand, by multiply-adds: memory is all that such a product waits for."""

from ..device import tl, triton
from ..matmul.generic.epilogues import finish
from ..matmul.generic.operands import Bias, ProductOutput
from ..tiles import follow_kernel_before, in_units, load_tile, load_vector, split_range, strides_in_units


@triton.jit(do_not_specialize=["splits"])
def row_product_kernel(
    left_ptr, right_ptr, out_ptr, bias_ptr,
    stride_lk, right_strides, stride_b, N, K, splits,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    END: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr,
    RIGHT_TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow_kernel_before(DEPENDENT)
    K = in_units(K, UNIT)
    _, stride_rn, stride_rk = strides_in_units(right_strides, RIGHT_TRANSPOSED, UNIT)
    if RIGHT_TRANSPOSED:
        N = in_units(N, UNIT)
    tiles = tl.cdiv(N, BLOCK_N)
    split = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    first, end = split_range(split, K, splits, BLOCK_K)
    for start in tl.range(first, end, BLOCK_K):
        right = load_tile(right_ptr, cols, start + inner, stride_rn, stride_rk, N, K)
        left = load_vector(left_ptr, start + inner, stride_lk, K)
        sums += right.to(tl.float32) * left[None, :]
    acc = tl.sum(sums, 1)[None, :]
    bias, out = Bias(bias_ptr, 0, stride_b, N), ProductOutput(out_ptr, 1, N, 1)
    finish(acc, out, bias, 0, tl.arange(0, 1), cols, split, END, ACTIVATION, ACCURACY)
