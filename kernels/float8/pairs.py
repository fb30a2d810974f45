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
# A tile of the transposing kernel: rows of the matrix, and bytes of each. More bytes take more registers, with which
# fewer programs run at once. A row of the transpose gets as many bytes as a tile has rows.
_TILE_ROWS, _TILE_BYTES = 128, 128
# Rows of a transpose begin at multiples of so many bytes.
_UNIT = tl.constexpr(16)
# Scales that one program multiplies at once, and its warps: it alone finds the largest product, of all rows or of an
# expert's.
_ALL_SCALES, _SCALES_OF_AN_EXPERT = (16384, 32), (4096, 8)
# Float32 numbers in 16 bytes.
_ALIGNED = tl.constexpr(4)


@triton.jit
def _exponents(left_ptr, right_ptr, rows, M):
    """The sums of the biased exponents of two powers of two for each row; larger than any if one is not finite."""
    left = load_vector(left_ptr, rows, 1, M).to(tl.int32, bitcast=True) >> 23
    right = load_vector(right_ptr, rows, 1, M).to(tl.int32, bitcast=True) >> 23
    return tl.where((left == 255) | (right == 255), _NOT_FINITE, left + right)


@triton.jit
def _combine_scales_kernel(
    left_ptr, right_ptr, of_left_ptr, starts_ptr, factors_ptr, scales_ptr, M, N, BLOCK: tl.constexpr
):  # fmt: skip
    """Products of two scales of each row, relative to the largest of them, or of those of the same expert.

    The largest one is left's scale: ``N`` times, multiplied by what there is for left's columns, or that of each of
    ``N`` experts, which have a program each. Right's, which is 1, is stored behind it.
    """
    begin, program = 0, tl.program_id(0)
    if starts_ptr is not None:
        begin, M = tl.load(starts_ptr + program), tl.load(starts_ptr + program + 1)
    rows = begin + tl.arange(0, BLOCK)
    sums = _exponents(left_ptr, right_ptr, rows, M)
    for first in tl.range(BLOCK, M - begin, BLOCK):
        sums = tl.maximum(sums, _exponents(left_ptr, right_ptr, first + rows, M))
    most = tl.max(sums, 0)
    # Beyond the range of float32 lies 0 or infinity, as the weight gradient does.
    largest = tl.minimum(tl.maximum(most - 127, 0), 255) << 23
    largest = tl.where(most == _NOT_FINITE, 0x7FC00000, largest).to(tl.float32, bitcast=True)
    if of_left_ptr is None:
        tl.store(scales_ptr + program, largest)
    else:
        for first in tl.range(0, N, BLOCK):
            scales = largest * load_vector(of_left_ptr, first + rows, 1, N)
            tl.store(scales_ptr + first + rows, scales, mask=first + rows < N)
    tl.store(scales_ptr + tl.cdiv(N, _ALIGNED) * _ALIGNED, 1.0)
    for first in tl.range(0, M - begin, BLOCK):
        sums = _exponents(left_ptr, right_ptr, first + rows, M)
        factors = tl.maximum(sums - most + 127, 0) << 23
        tl.store(factors_ptr + first + rows, factors.to(tl.float32, bitcast=True), mask=first + rows < M)


@triton.jit
def _transpose_tile(
    x_ptr, factors_ptr, values_ptr, program, stride_x, stride_values, M, K, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of the transpose ``[K, M]`` of 8-bit values, times factors of rows if there are any, or of numbers by scales."""
    columns = tl.cdiv(K, BLOCK_K)
    band, tile = program // columns, program % columns
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


@triton.jit
def _transpose_pair_kernel(
    left_ptr, right_ptr, left_factors_ptr, right_factors_ptr, left_values_ptr, right_values_ptr, stride_left,
    stride_right, stride_values, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT_UNIT: tl.constexpr, RIGHT_UNIT: tl.constexpr,
):  # fmt: skip
    """Both transposes, ``[N, M]`` and ``[K, M]``: the programs of right come first."""
    stride_left, stride_right = assume_multiple(stride_left, LEFT_UNIT), assume_multiple(stride_right, RIGHT_UNIT)
    stride_values = assume_multiple(stride_values, _UNIT)
    program, of_right = tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    if program < of_right:
        _transpose_tile(
            right_ptr, right_factors_ptr, right_values_ptr, program, stride_right, stride_values, M, K, BLOCK_M, BLOCK_K
        )  # fmt: skip
    else:
        program -= of_right
        _transpose_tile(
            left_ptr, left_factors_ptr, left_values_ptr, program, stride_left, stride_values, M, N, BLOCK_M, BLOCK_N
        )  # fmt: skip


def transposed_pair(
    left: Scaled,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    ready: dict[Any, Any] | None = None,
    of_left: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[Scaled, Scaled]:
    """Both operands of ``leftᵀ right``, transposed, in 8 bits: ``[M, N]`` -> ``[N, M]``, and ``[M, K]`` -> ``[K, M]``.

    ``right`` are 16-bit numbers, or values in 8 bits, with contiguous rows, and ``right_scale`` the scales ``[M]`` of
    these rows in 8 bits. The result of left has one scale, or with float32 factors ``of_left``, contiguous and of any
    shape, that many: it is multiplied by them. The scale of right is 1. Rows of both results begin at multiples of 16
    bytes.

    ``starts`` ``[E + 1]`` are the first rows of E experts, which lie one behind the other, and the end of the last one.
    Then each has a product of its own, and the result of left a scale for each, ``[E]``; there is no ``of_left``.
    """
    (rows, columns), others = left.values.shape, right.shape[1]
    programs = 1 if starts is None else starts.numel() - 1
    count = programs if of_left is None else of_left.numel()
    aligned = ceil_div(count, _ALIGNED.value) * _ALIGNED.value
    factors, scales = left.scale.new_empty(rows), left.scale.new_empty(aligned + 1)
    stride = ceil_div(rows, _UNIT.value) * _UNIT.value
    x, in_8_bits = left.values.view(torch.int8), right.dtype == E4M3
    right = right.view(torch.int8) if in_8_bits else right
    values = [x.new_empty(size, stride) for size in (columns, others)]

    def combine() -> Launch:
        at_once, warps = _ALL_SCALES if starts is None else _SCALES_OF_AN_EXPERT
        return Launch(_combine_scales_kernel, programs, (rows, count), (), (at_once,), warps)

    def transpose() -> Launch:
        widths = _TILE_BYTES, _TILE_BYTES // right.element_size()
        bands, tiles = ceil_div(rows, _TILE_ROWS), ceil_div(columns, widths[0]) + ceil_div(others, widths[1])
        strides = x.stride(0), right.stride(0)
        units = vector_unit(x, strides[0], columns), vector_unit(right, strides[1], others)
        numbers, constants = (*strides, stride, rows, columns, others), (_TILE_ROWS, *widths, *units)
        return Launch(_transpose_pair_kernel, bands * tiles, numbers, (), constants, 4)

    combined = prepared(ready, ("combined scales", rows, count, of_left is None, starts is None), combine)
    combined((left.scale, right_scale, of_left, starts, factors, scales))
    name = "transposed pair", rows, columns, others, right.dtype, layout_of(x), layout_of(right)
    both = prepared(ready, name, transpose)
    both((x, right, factors, None if in_8_bits else right_scale, *values))
    left_values, right_values = (each.view(E4M3)[:, :rows] for each in values)
    if of_left is not None:
        left_scale = scales[:count].view_as(of_left)
    else:
        left_scale = scales[0] if starts is None else scales[:count]
    return Scaled(left_values, left_scale), Scaled(right_values, scales[aligned])
