"""Both operands of a weight gradient in 8 bits, transposed, with scales that the sum over rows allows."""

from typing import Any

import torch

from ..device import tl, triton
from ..hopper import Scaled
from ..launching import Launch, ceil_div, layout_of, prepared, vector_unit
from ..tiles import assume_multiple, inverse, load_tile, load_vector, store_tile
from .quantising import E4M3, quantised

# Larger than the sum of two biased exponents.
_NOT_FINITE = tl.constexpr(1000)
# A tile of the transposing kernel: rows and columns of the matrix. A row of the transpose gets 128 bytes at a time.
_TILE_ROWS, _TILE_COLUMNS = 128, 128
# Rows of a transpose begin at multiples of so many bytes.
_UNIT = 16
# Scales that one program multiplies at once: it alone finds the largest product.
_SCALES_AT_ONCE = 4096


@triton.jit
def _exponents(left_ptr, right_ptr, rows, M):
    """The sums of the biased exponents of two powers of two for each row; larger than any if one is not finite."""
    left = load_vector(left_ptr, rows, 1, M).to(tl.int32, bitcast=True) >> 23
    right = load_vector(right_ptr, rows, 1, M).to(tl.int32, bitcast=True) >> 23
    return tl.where((left == 255) | (right == 255), _NOT_FINITE, left + right)


@triton.jit
def _combine_scales_kernel(left_ptr, right_ptr, factors_ptr, largest_ptr, M, BLOCK: tl.constexpr):
    """Products of two scales of each row, relative to the largest of them, which is stored in front of a 1."""
    rows = tl.arange(0, BLOCK)
    sums = _exponents(left_ptr, right_ptr, rows, M)
    for first in tl.range(BLOCK, M, BLOCK):
        sums = tl.maximum(sums, _exponents(left_ptr, right_ptr, first + rows, M))
    most = tl.max(sums, 0)
    # Beyond the range of float32 lies 0 or infinity, as the weight gradient does.
    largest = tl.minimum(tl.maximum(most - 127, 0), 255) << 23
    largest = tl.where(most == _NOT_FINITE, 0x7FC00000, largest)
    tl.store(largest_ptr, largest.to(tl.float32, bitcast=True))
    tl.store(largest_ptr + 1, 1.0)
    for first in tl.range(0, M, BLOCK):
        sums = _exponents(left_ptr, right_ptr, first + rows, M)
        factors = tl.maximum(sums - most + 127, 0) << 23
        tl.store(factors_ptr + first + rows, factors.to(tl.float32, bitcast=True), mask=first + rows < M)


@triton.jit
def _transpose_kernel(
    x_ptr, factors_ptr, values_ptr, stride_x, stride_values, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The transpose ``[K, M]`` of 8-bit values, times factors of rows if there are any, or of numbers over scales."""
    stride_x, stride_values = assume_multiple(stride_x, UNIT), assume_multiple(stride_values, UNIT)
    columns = tl.cdiv(K, BLOCK_K)
    band, tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    rows = band.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    x = load_tile(x_ptr, rows, cols, stride_x, 1, M, K)
    if factors_ptr is not None:
        factors = tl.load(factors_ptr + rows, mask=rows < M, other=1.0)
        if x_ptr.dtype.element_ty == tl.int8:
            x = x.to(tl.float8e4nv, bitcast=True)
        else:
            factors = inverse(factors)
        x = quantised(x, factors[:, None])
    store_tile(values_ptr, tl.trans(x), cols, rows, stride_values, 1, K, M)


def transposed_pair(
    left: Scaled, right: torch.Tensor, right_scale: torch.Tensor, ready: dict[Any, Any] | None = None
) -> tuple[Scaled, Scaled]:
    """Both operands of ``leftᵀ right``, transposed, in 8 bits: ``[M, N]`` -> ``[N, M]``, and ``[M, K]`` -> ``[K, M]``.

    ``right`` are 16-bit numbers, or values in 8 bits, with contiguous rows, and ``right_scale`` the scales ``[M]`` of
    these rows in 8 bits. The result of left has one scale, that of right is 1. Rows of both results begin at multiples
    of 16 bytes.
    """
    rows, device = right.shape[0], right.device
    factors, largest = (torch.empty(size, dtype=torch.float32, device=device) for size in (rows, 2))

    def prepare() -> Launch:
        return Launch(_combine_scales_kernel, 1, (rows,), (), (_SCALES_AT_ONCE,), 8)

    prepared(ready, ("combined scales", rows), prepare)((left.scale, right_scale, factors, largest))
    right_factors = None if right.dtype == E4M3 else right_scale
    return (
        Scaled(_transposed(left.values, factors, ready), largest[0]),
        Scaled(_transposed(right, right_factors, ready), largest[1]),
    )


def _transposed(x: torch.Tensor, factors: torch.Tensor | None, ready: dict[Any, Any] | None) -> torch.Tensor:
    x = x.view(torch.int8) if x.dtype == E4M3 else x
    rows, columns = x.shape
    stride = ceil_div(rows, _UNIT) * _UNIT
    values = x.new_empty(columns, stride, dtype=torch.int8)

    def prepare() -> Launch:
        programs = ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS)
        tile = _TILE_ROWS, _TILE_COLUMNS, vector_unit(x, x.stride(0), columns)
        return Launch(_transpose_kernel, programs, (x.stride(0), stride, rows, columns), (), tile, 4)

    name = "transposed", rows, columns, x.dtype, layout_of(x), factors is None
    prepared(ready, name, prepare)((x, factors, values))
    return values.view(E4M3)[:, :rows]
