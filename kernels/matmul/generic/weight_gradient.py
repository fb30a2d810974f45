"""aᵀ b, and on request Σ a, over all rows, over ranges of them (split K), or over each expert's (grouped K)."""

import torch

from ...device import tl, triton
from ...launching import Launch, ceil_div
from ...tiles import split_range, store_tile
from ...tuning.grouped_gemm import GroupedTiles
from .mainloop import mainloop, multiply
from .operands import Operand
from .schedules import swizzled_tile


@triton.jit(do_not_specialize=["M", "splits", "zero"])
def _weight_and_bias_gradient_kernel(
    a_ptr, b_ptr, dw_ptr, db_ptr, starts_ptr,
    a_strides, b_strides, out_strides, O, K, M, splits, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # A part sums one range of rows: a split, or an expert. ``zero`` is 0 at run time only: see ``tiles.add_product``.
    stride_part, stride_wo, stride_wk = out_strides
    tiles = tl.cdiv(O, BLOCK_M) * tl.cdiv(K, BLOCK_N)
    part = tl.program_id(0) // tiles
    tile_o, tile_k = swizzled_tile(tl.program_id(0) % tiles, O, K, BLOCK_M, BLOCK_N)
    outer = tile_o * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    if starts_ptr is None:
        first, end = split_range(part, M, splits, BLOCK_INNER)
        row_limit = M
    else:
        first, end = tl.load(starts_ptr + part), tl.load(starts_ptr + part + 1)
        row_limit = end
    # Both are transposed: the inner axis is their rows.
    a = Operand(a_ptr, 0, a_strides[1], a_strides[0], O, row_limit)
    b = Operand(b_ptr, 0, b_strides[1], b_strides[0], K, row_limit)
    offset = part.to(tl.int64) * stride_part
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    SUMMED: tl.constexpr = db_ptr is not None
    # Programs of the first column of tiles also sum a.
    if SUMMED and tile_k == 0:
        absent = Operand(None, 0, 0, 0, 0, 0)
        acc, _, sums = mainloop(
            acc, acc, a, b, absent, a, outer, cols, 0, first, end, zero, BLOCK_INNER, INPUT_PRECISION
        )  # fmt: skip
        total = tl.sum(sums, 0).to(db_ptr.dtype.element_ty)
        tl.store(db_ptr + offset + outer, total, mask=outer < O)
    else:
        acc = multiply(acc, a, b, outer, cols, 0, first, end, zero, BLOCK_INNER, INPUT_PRECISION)
    store_tile(dw_ptr + offset, acc, outer, cols, stride_wo, stride_wk, O, K)


def prepare_weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    out_strides: tuple[int, ...],
    parts: int,
    input_precision: str,
    tiles: GroupedTiles,
) -> Launch:
    """The launch for a ``[M, O]`` and b ``[M, K]``, whose results ``[parts, O, K]`` have these strides.

    Parts are ranges of equal length, or experts. Its tensors are a, b, the products, the sums of a, whose parts are as
    far apart as the products, and the first row of each expert: None for those that are absent.
    """
    (rows, units), columns = a.shape, b.shape[1]
    return Launch(
        _weight_and_bias_gradient_kernel,
        ceil_div(units, tiles.block_m) * ceil_div(columns, tiles.block_n) * parts,
        (a.stride(), b.stride(), out_strides, units, columns),
        (rows, parts, 0.0),
        (tiles.block_m, tiles.block_n, tiles.block_inner, input_precision),
        tiles.num_warps,
        tiles.num_stages,
    )
