"""Quantising a matrix, by its rows or by those of its transpose."""

from typing import Any

import torch

from ..device import tl, triton
from ..hopper import Scaled
from ..launching import Launch, ceil_div, layout_of, prepared, vector_unit
from ..tiles import assume_multiple, inverse, load_tile, load_vector, store_tile

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Smaller maxima count as this: the inverse of a scale is still finite.
SMALLEST = 2.0**-100

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
# The longest block of a row that a program keeps in registers; longer rows are read twice.
_LONGEST_BLOCK = 16384
# Elements of a program with short rows, and of each warp of one with longer rows.
_ELEMENTS, _OF_A_WARP = 4096, 1024
# Elements of the tiles that a transposing program reads, the columns of the matrix that such a tile may have, and how
# many programs are enough. Fewer columns give more programs; 16 of 2 bytes are a sector of the cache.
_TILE_ELEMENTS, _TILE_COLUMNS, _ENOUGH_PROGRAMS = 16384, (64, 32, 16), 128


@triton.jit
def _magnitude(x):
    """The absolute values as integers of the same order, in which NaN is larger than infinity."""
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def _as_number(magnitude, x):
    """The float32 of a :func:`_magnitude` of such numbers as x."""
    if x.dtype.primitive_bitwidth == 32:
        return magnitude.to(tl.float32, bitcast=True)
    else:
        return magnitude.to(tl.int16).to(x.dtype, bitcast=True).to(tl.float32)


@triton.jit
def scales_of(largest):
    """(scale, its inverse) of rows with these absolute maxima."""
    # Not tl.maximum, which drops NaN.
    bounded = tl.where(largest < _SMALLEST, _SMALLEST, largest)
    ratio = tl.div_rn(bounded, tl.zeros_like(bounded) + _LARGEST)
    # Round up to a power of two: without a mantissa, which carries into the exponent unless it is 0.
    bits = ratio.to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, ratio)
    return scale, inverse(scale)


@triton.jit
def quantised(x, factor):
    """e4m3 values, as integers of 8 bits."""
    return (x.to(tl.float32) * factor).to(tl.float8e4nv).to(tl.int8, bitcast=True)


@triton.jit
def _block(x_ptr, factors_ptr, rows, cols, stride, M, K):
    """A block of a matrix, with the columns multiplied by factors, if there are any."""
    x = load_tile(x_ptr, rows, cols, stride, 1, M, K)
    return x if factors_ptr is None else x.to(tl.float32) * load_vector(factors_ptr, cols, 1, K)[None, :]


@triton.jit
def _stored(values_ptr, x, factor, weights_ptr, rows, cols, stride, M, K):
    """Store a quantised block, and return the sums of the weighted squares of its rows before they were rounded."""
    x = x.to(tl.float32) * factor[:, None]
    store_tile(values_ptr, x.to(tl.float8e4nv).to(tl.int8, bitcast=True), rows, cols, stride, 1, M, K)
    if weights_ptr is not None:
        x *= load_vector(weights_ptr, cols, 1, K)[None, :]
    return tl.sum(x * x, 1)


@triton.jit(do_not_specialize=["M"])
def _quantise_rows_kernel(
    x_ptr, other_ptr, factors_ptr, weights_ptr, values_ptr, scales_ptr, norms_ptr, stride_x, stride_other,
    stride_values, K, M, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rows ``[x | other]``; ``WHOLE``: a row of each is one block, which stays in registers."""
    stride_x, stride_other = assume_multiple(stride_x, UNIT), assume_multiple(stride_other, UNIT)
    stride_values, K = assume_multiple(stride_values, UNIT), assume_multiple(K, UNIT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        x = _block(x_ptr, factors_ptr, rows, cols, stride_x, M, K)
        largest = tl.max(_magnitude(x), 1)
        if other_ptr is not None:
            other = load_tile(other_ptr, rows, cols, stride_other, 1, M, K)
            largest = tl.maximum(largest, tl.max(_magnitude(other), 1))
        scale, factor = scales_of(_as_number(largest, x))
        squares = _stored(values_ptr, x, factor, weights_ptr, rows, cols, stride_values, M, K)
        if other_ptr is not None:
            squares += _stored(values_ptr + K, other, factor, None, rows, cols, stride_values, M, K)
    else:
        x = _block(x_ptr, factors_ptr, rows, cols, stride_x, M, K)
        largest = _magnitude(x)
        for first in tl.range(BLOCK, K, BLOCK):
            x = _block(x_ptr, factors_ptr, rows, first + cols, stride_x, M, K)
            largest = tl.maximum(largest, _magnitude(x))
        if other_ptr is not None:
            for first in tl.range(0, K, BLOCK):
                x = load_tile(other_ptr, rows, first + cols, stride_other, 1, M, K)
                largest = tl.maximum(largest, _magnitude(x))
        scale, factor = scales_of(_as_number(tl.max(largest, 1), x))
        squares = tl.zeros((ROWS,), tl.float32)
        for first in tl.range(0, K, BLOCK):
            x = _block(x_ptr, factors_ptr, rows, first + cols, stride_x, M, K)
            squares += _stored(values_ptr, x, factor, weights_ptr, rows, first + cols, stride_values, M, K)
        if other_ptr is not None:
            for first in tl.range(0, K, BLOCK):
                x = load_tile(other_ptr, rows, first + cols, stride_other, 1, M, K)
                squares += _stored(values_ptr + K, x, factor, None, rows, first + cols, stride_values, M, K)
    tl.store(scales_ptr + rows, scale, mask=rows < M)
    if norms_ptr is not None:
        # Squares of values that are divided by the scale cannot overflow.
        tl.store(norms_ptr + rows, tl.sqrt_rn(squares) * scale, mask=rows < M)


@triton.jit
def _weighted_rows(x_ptr, weights_ptr, rows, cols, stride_m, stride_k, M, K):
    """A tile, with the rows multiplied by weights, if there are any."""
    x = load_tile(x_ptr, rows, cols, stride_m, stride_k, M, K)
    return x if weights_ptr is None else x.to(tl.float32) * load_vector(weights_ptr, rows, 1, M)[:, None]


@triton.jit
def _column_maxima(x_ptr, weights_ptr, cols, stride_m, stride_k, M, K, BLOCK_M: tl.constexpr):
    """The absolute maxima of columns, as the :func:`_magnitude` of float32."""
    rows = tl.arange(0, BLOCK_M)
    x = _weighted_rows(x_ptr, weights_ptr, rows, cols, stride_m, stride_k, M, K)
    largest = _magnitude(x)
    for first in tl.range(BLOCK_M, M, BLOCK_M, loop_unroll_factor=2):
        x = _weighted_rows(x_ptr, weights_ptr, first + rows, cols, stride_m, stride_k, M, K)
        largest = tl.maximum(largest, _magnitude(x))
    return _magnitude(_as_number(tl.max(largest, 0), x))


@triton.jit
def _store_transpose(
    values_ptr, x_ptr, weights_ptr, factor, cols, stride_m, stride_k, stride_values, M, K, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Store quantised columns as rows, and return the sums of their squares before they were rounded."""
    rows = tl.arange(0, BLOCK_M)
    squares = tl.zeros((BLOCK_M, factor.shape[0]), tl.float32)
    # Backwards: what the search for maxima read last is still in the cache.
    for back in tl.range(0, M, BLOCK_M):
        places = tl.cdiv(M, BLOCK_M) * BLOCK_M - BLOCK_M - back + rows
        x = _weighted_rows(x_ptr, weights_ptr, places, cols, stride_m, stride_k, M, K)
        x = x.to(tl.float32) * factor[None, :]
        values = x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        store_tile(values_ptr, tl.trans(values), cols, places, stride_values, 1, K, M)
        squares += x * x
    return tl.sum(squares, 0)


@triton.jit
def _quantise_transposed_kernel(
    x_ptr, other_ptr, weights_ptr, other_weights_ptr, values_ptr, scales_ptr, norms_ptr, stride_e, stride_m, stride_k,
    other_stride_e, other_stride_m, other_stride_k, stride_values, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The transposes ``[E, K, M]``, or ``[E, K, 2 M]`` of two matrices: each program has columns of one entry."""
    columns = tl.cdiv(K, BLOCK_K)
    entry, tile = (tl.program_id(0) // columns).to(tl.int64), tl.program_id(0) % columns
    cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptr += entry * stride_e
    values_ptr += entry * K * stride_values
    places = entry * K + cols
    largest = _column_maxima(x_ptr, weights_ptr, cols, stride_m, stride_k, M, K, BLOCK_M)
    if other_ptr is not None:
        other_ptr += entry * other_stride_e
        of_other = _column_maxima(
            other_ptr, other_weights_ptr, cols, other_stride_m, other_stride_k, M, K, BLOCK_M
        )  # fmt: skip
        largest = tl.maximum(largest, of_other)
    scale, factor = scales_of(largest.to(tl.float32, bitcast=True))
    squares = tl.zeros_like(factor)
    if other_ptr is not None:
        squares += _store_transpose(
            values_ptr + M, other_ptr, other_weights_ptr, factor, cols, other_stride_m, other_stride_k, stride_values,
            M, K, BLOCK_M,
        )  # fmt: skip
    squares += _store_transpose(
        values_ptr, x_ptr, weights_ptr, factor, cols, stride_m, stride_k, stride_values, M, K, BLOCK_M
    )  # fmt: skip
    tl.store(scales_ptr + places, scale, mask=cols < K)
    if norms_ptr is not None:
        tl.store(norms_ptr + places, tl.sqrt_rn(squares) * scale, mask=cols < K)


def quantise_rows(
    x: torch.Tensor,
    other: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    *,
    factors: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> Scaled:
    """x ``[M, K]`` of 16-bit numbers in 8 bits, with one scale for each row.

    With ``other``, of the same shape and dtype, both lie side by side: ``[M, 2 K]``. Elements of a row are contiguous.
    With float32 ``factors`` ``[K]``, and no ``other``, the columns are multiplied by them first. ``norms`` ``[M]``
    receives the Euclidean norms of the rows in float32; with ``weights`` ``[K]`` and no ``other`` those of x times the
    weights, while the values are those of x. ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``.
    """
    rows, columns = x.shape
    wide = columns if other is None else 2 * columns
    found = Scaled(x.new_empty(rows, wide, dtype=E4M3), x.new_empty(rows, dtype=torch.float32))
    if not rows:
        return found
    name = (
        "quantised rows", rows, columns, layout_of(x), None if other is None else layout_of(other), factors is None,
        norms is None, weights is None,
    )  # fmt: skip
    launch = prepared(ready, name, _prepare_rows, x, other)
    launch((x, other, factors, weights, found.values.view(torch.int8), found.scale, norms))
    return found


def _prepare_rows(x: torch.Tensor, other: torch.Tensor | None) -> Launch:
    rows, columns = x.shape
    for name, each in {"x": x, "other": other}.items():
        if each is not None and (each.stride(1) != 1 or each.shape != x.shape):
            layout = f"shape {list(each.shape)} and strides {each.stride()}"
            raise ValueError(f"{name} has {layout}: expected {list(x.shape)}, contiguous in a row")
    block = min(triton.next_power_of_2(columns), _LONGEST_BLOCK)
    at_once = max(1, _ELEMENTS // block)
    strides = x.stride(0), 0 if other is None else other.stride(0)
    wide = columns if other is None else 2 * columns
    return Launch(
        _quantise_rows_kernel, ceil_div(rows, at_once), (*strides, wide, columns), (rows,),
        (at_once, block, columns <= block, vector_unit(x, columns, *strides)), max(4, block // _OF_A_WARP),
    )  # fmt: skip


def quantise_transposed(
    x: torch.Tensor,
    other: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    *,
    weights: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
) -> Scaled:
    """The transpose ``[K, M]`` of x ``[M, K]`` of 16-bit numbers in 8 bits, with one scale for each of its rows.

    With ``other``, of the same shape and dtype, both transposes lie side by side: ``[K, 2 M]``. Any strides. With
    float32 ``weights`` ``[1 or 2, M]`` the rows of x and of ``other`` are multiplied by them first. ``norms`` ``[K]``
    receives the Euclidean norms of the result's rows in float32. Without weights, x may be a batch ``[E, M, K]``, of
    which each matrix is transposed, and norms ``[E, K]``.
    """
    *batch, rows, columns = x.shape
    wide = rows if other is None else 2 * rows
    found = Scaled(x.new_empty(*batch, columns, wide, dtype=E4M3), x.new_empty(*batch, columns, dtype=torch.float32))
    name = (
        "quantised transpose", *x.shape, layout_of(x), None if other is None else layout_of(other), weights is None,
        norms is None,
    )  # fmt: skip
    launch = prepared(ready, name, _prepare_transposed, x, other)
    of_rows = (None, None) if weights is None else (weights[0], None if other is None else weights[1])
    launch((x, other, *of_rows, found.values.view(torch.int8), found.scale, norms))
    return found


def _prepare_transposed(x: torch.Tensor, other: torch.Tensor | None) -> Launch:
    (entries, strides), (rows, columns) = _batch(x), x.shape[-2:]
    of_other, wide = ((0, 0, 0), rows) if other is None else (_batch(other)[1], 2 * rows)
    programs, tile = column_programs(entries, columns)
    return Launch(_quantise_transposed_kernel, programs, (*strides, *of_other, wide, rows, columns), (), tile, 8)


def column_programs(entries: int, columns: int) -> tuple[int, tuple[int, int]]:
    """How many programs of 8 warps read whole columns of so many matrices, and the rows and columns of their tiles."""
    found = [(entries * ceil_div(columns, width), (_TILE_ELEMENTS // width, width)) for width in _TILE_COLUMNS]
    return next((each for each in found if each[0] >= _ENOUGH_PROGRAMS), found[-1])


def _batch(x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """The number of matrices, and the strides of a batch of them."""
    return (x.shape[0], x.stride()) if x.dim() == 3 else (1, (0, *x.stride()))
