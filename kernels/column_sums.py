"""Sums of a matrix over its rows: a bias gradient ``db = Σ_m dy`` that is not fused into a product.

Each program sums one band of rows over a few columns. ``kernels.partials`` adds the bands' float32 partials in a fixed
order and rounds once: no atomics, the same bits every time. Few rows form a single band, whose sums are the result.
"""

from typing import Any

import torch

from .device import tl, triton
from .launching import Launch, ceil_div, layout_of, prepared, vector_unit
from .partials import ReduceBlocks, reduce_partials
from .tiles import assume_multiple, load_tile, load_vector
from .tuning import BAND_BLOCKS, MOST_SUMMED_BANDS, ColumnSumTiles

_BLOCKS = ReduceBlocks(*BAND_BLOCKS)
# One program sums this many blocks of rows in the time of a second launch.
_BLOCKS_OF_ONE_BAND = 4


@triton.jit(do_not_specialize=["M", "bands"])
def _column_sums_kernel(
    dy_ptr, scales_ptr, sums_ptr, stride_m, stride_n, N, M, bands,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    N, stride_m = assume_multiple(N, UNIT), assume_multiple(stride_m, UNIT)
    band = tl.program_id(0) % bands
    cols = tl.program_id(0) // bands * BLOCK_N + tl.arange(0, BLOCK_N)
    band_rows = tl.cdiv(tl.cdiv(M, BLOCK_M), bands) * BLOCK_M
    first = band.to(tl.int64) * band_rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # With few rows the last bands may be empty.
    for row in tl.range(0, tl.minimum(band_rows, M - first).to(tl.int32), BLOCK_M):
        rows = first + row + tl.arange(0, BLOCK_M)
        dy = load_tile(dy_ptr, rows, cols, stride_m, stride_n, M, N)
        if scales_ptr is None:
            sums += dy.to(tl.float32)
        else:
            values = dy.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            sums += values * load_vector(scales_ptr, rows, 1, M)[:, None]
    total = tl.sum(sums, 0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + band.to(tl.int64) * N + cols, total, mask=cols < N)


def column_partials(
    dy: torch.Tensor, tiles: ColumnSumTiles, ready: dict[Any, Any] | None = None, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums of dy ``[M, N]``, N at least 1, over bands of rows: float32 ``[bands, N]``.

    Few rows are a single band: then the result is ``[N]`` in dy's dtype. With ``scales`` ``[M]`` dy is in 8 bits, and
    all results are float32.

    ``ready`` caches the prepared launch for calls that differ in addresses only.
    """
    shape, launch = prepared(ready, "bands", _prepare_bands, dy, tiles)
    in_float32 = scales is not None or len(shape) == 2
    partials = dy.new_empty(shape, dtype=torch.float32 if in_float32 else dy.dtype)
    launch((dy if scales is None else dy.view(torch.int8), scales, partials))
    return partials


def _prepare_bands(dy: torch.Tensor, tiles: ColumnSumTiles) -> tuple[tuple[int, ...], Launch]:
    rows, columns = dy.shape
    column_blocks, row_blocks = ceil_div(columns, tiles.block_n), ceil_div(rows, tiles.block_m)
    bands = 1
    if row_blocks > _BLOCKS_OF_ONE_BAND:
        bands = max(1, min(row_blocks, tiles.programs // column_blocks, MOST_SUMMED_BANDS))
    launch = Launch(
        _column_sums_kernel,
        bands * column_blocks,
        (*dy.stride(), columns),
        (rows, bands),
        (tiles.block_m, tiles.block_n, vector_unit(dy, columns, dy.stride(0))),
        tiles.num_warps,
        tiles.num_stages,
    )
    return (columns,) if bands == 1 else (bands, columns), launch


def column_sums(
    dy: torch.Tensor, tiles: ColumnSumTiles, ready: dict[Any, Any] | None = None, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums ``[N]`` of dy ``[M, N]`` over its rows, in dy's dtype, which has at most 32 bits. Any strides.

    With ``scales`` ``[M]`` dy are the values of rows in 8 bits, and their sums are float32.

    ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``); dy's layout may change between its executions.
    """
    if not dy.shape[1]:
        return dy.new_empty(0)
    if ready is not None:
        ready = ready.setdefault(("column sums", dy.dtype, *layout_of(dy)), {})
    partials = column_partials(dy, tiles, ready, scales)
    if partials.dim() == 1:
        return partials
    sums = partials.new_empty(dy.shape[1], dtype=dy.dtype if scales is None else torch.float32)
    reduce_partials(partials, [sums], blocks=_BLOCKS, ready=ready)
    return sums
