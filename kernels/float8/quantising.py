"""Quantising a matrix, by its rows or by those of its transpose."""

from collections.abc import Sequence
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
# Tiles of the transposing kernels: rows and columns of the matrix. A row of the transpose gets 128 bytes at a time.
_TILE_ROWS, _TILE_COLUMNS = 128, 64
# Rows of one band, whose maxima one program finds.
_BAND_ROWS = 512


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
def _column_maxima_kernel(
    x_ptr, weights_ptr, maxima_ptr, squares_ptr, stride_e, stride_m, stride_k, M, K, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The absolute maxima, and the sums of squares, of the columns in one band of rows, float32 ``[E, bands, K]``."""
    columns, bands = tl.cdiv(K, BLOCK_K), tl.cdiv(M, BAND)
    band, tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    x_ptr += (band // bands).to(tl.int64) * stride_e
    first = (band % bands).to(tl.int64) * BAND
    cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    x = _weighted_rows(x_ptr, weights_ptr, first + tl.arange(0, BLOCK_M), cols, stride_m, stride_k, M, K)
    largest = _magnitude(x)
    squares = x.to(tl.float32) * x.to(tl.float32)
    for row in tl.range(BLOCK_M, BAND, BLOCK_M):
        x = _weighted_rows(x_ptr, weights_ptr, first + row + tl.arange(0, BLOCK_M), cols, stride_m, stride_k, M, K)
        largest = tl.maximum(largest, _magnitude(x))
        squares += x.to(tl.float32) * x.to(tl.float32)
    places = band.to(tl.int64) * K + cols
    tl.store(maxima_ptr + places, _as_number(tl.max(largest, 0), x), mask=cols < K)
    if squares_ptr is not None:
        tl.store(squares_ptr + places, tl.sum(squares, 0), mask=cols < K)


@triton.jit
def _quantise_transposed_kernel(
    x_ptr, weights_ptr, largest_ptr, values_ptr, scales_ptr, stride_e, stride_m, stride_k, stride_values, M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The transposes ``[E, K, M]`` of x, whose columns have these maxima ``[E, K]``.

    The first program of a column stores its scale.
    """
    columns, bands = tl.cdiv(K, BLOCK_K), tl.cdiv(M, BLOCK_M)
    band, tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    entry, band = (band // bands).to(tl.int64), band % bands
    x_ptr += entry * stride_e
    values_ptr += entry * K * stride_values
    largest_ptr += entry * K
    scales_ptr += entry * K
    rows = band.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    scale, factor = scales_of(load_vector(largest_ptr, cols, 1, K))
    x = _weighted_rows(x_ptr, weights_ptr, rows, cols, stride_m, stride_k, M, K)
    store_tile(values_ptr, tl.trans(quantised(x, factor[None, :])), cols, rows, stride_values, 1, K, M)
    if band == 0:
        tl.store(scales_ptr + cols, scale, mask=cols < K)


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
    receives the Euclidean norms of the result's rows in float32. Without both, x may be a batch ``[E, M, K]``, of which
    each matrix is transposed.
    """
    *batch, rows, columns = x.shape
    given = [x] if other is None else [x, other]
    wide = rows * len(given)
    found = Scaled(x.new_empty(*batch, columns, wide, dtype=E4M3), x.new_empty(*batch, columns, dtype=torch.float32))
    bands = ceil_div(rows, _BAND_ROWS)
    partial = x.new_empty(1 if norms is None else 2, len(given), *batch, bands, columns, dtype=torch.float32)
    of_rows: Sequence[torch.Tensor | None] = (None, None) if weights is None else weights.unbind()
    for place, each in enumerate(given):
        squares = None if norms is None else partial[1, place]
        launch = _prepared_maxima(each, of_rows[place], squares, ready)
        launch((each, of_rows[place], partial[0, place], squares))
    largest = partial[0].amax((0, -2))
    if norms is not None:
        torch.sum(partial[1], (0, 1), out=norms).sqrt_()
    values = found.values.view(torch.int8)
    for place, each in enumerate(given):
        part = values[..., place * rows : (place + 1) * rows]
        launch = _prepared_transposed(each, of_rows[place], part, ready)
        launch((each, of_rows[place], largest, part, found.scale))
    return found


def column_norms(x: torch.Tensor, other: torch.Tensor, ready: dict[Any, Any] | None = None) -> torch.Tensor:
    """The Euclidean norms of the columns of x, above ``other``: both ``[N, K]`` -> ``[K]`` in float32. Any strides."""
    rows, columns = x.shape
    partial = x.new_empty(2, 2, ceil_div(rows, _BAND_ROWS), columns, dtype=torch.float32)
    for place, each in enumerate((x, other)):
        launch = _prepared_maxima(each, None, partial[1, place], ready)
        launch((each, None, partial[0, place], partial[1, place]))
    return partial[1].sum((0, 1)).sqrt_()


def _prepared_maxima(
    x: torch.Tensor, weights: torch.Tensor | None, squares: torch.Tensor | None, ready: dict[Any, Any] | None
) -> Launch:
    (entries, strides), (rows, columns), block_rows = _batch(x), x.shape[-2:], _TILE_ROWS // 2

    def prepare() -> Launch:
        programs = entries * ceil_div(rows, _BAND_ROWS) * ceil_div(columns, _TILE_COLUMNS)
        numbers = (*strides, rows, columns)
        return Launch(_column_maxima_kernel, programs, numbers, (), (_BAND_ROWS, block_rows, _TILE_COLUMNS), 4)

    name = "column maxima", *x.shape, layout_of(x), weights is None, squares is None
    return prepared(ready, name, prepare)


def _prepared_transposed(
    x: torch.Tensor, weights: torch.Tensor | None, values: torch.Tensor, ready: dict[Any, Any] | None
) -> Launch:
    (entries, strides), (rows, columns) = _batch(x), x.shape[-2:]

    def prepare() -> Launch:
        programs = entries * ceil_div(rows, _TILE_ROWS) * ceil_div(columns, _TILE_COLUMNS)
        numbers = (*strides, values.stride(-2), rows, columns)
        return Launch(_quantise_transposed_kernel, programs, numbers, (), (_TILE_ROWS, _TILE_COLUMNS), 4)

    name = "quantised transpose", *x.shape, layout_of(x), layout_of(values), weights is None
    return prepared(ready, name, prepare)


def _batch(x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """The number of matrices, and the strides of a batch of them."""
    return (x.shape[0], x.stride()) if x.dim() == 3 else (1, (0, *x.stride()))
