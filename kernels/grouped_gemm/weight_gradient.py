"""Gradients of the experts' weights and biases: products and sums over each expert's rows, one program each."""

from typing import Any

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..tiles import add_product, grouped_tile, load_tile, store_tile
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from . import sm90
from .hidden import GROUP
from .sorting import SortedRows

_SUM_ROWS, _SUM_COLUMNS = 32, 64


@triton.jit(do_not_specialize=["zero"])
def _experts_weight_gradient_kernel(
    a_ptr, b_ptr, starts_ptr, out_ptr, stride_oe, stride_om, stride_on, R, C, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # ``zero`` is 0, which only the caller knows.
    tiles = tl.cdiv(R, BLOCK_M) * tl.cdiv(C, BLOCK_N)
    expert = tl.program_id(0) // tiles
    tile_row, tile_column = grouped_tile(tl.program_id(0) % tiles, tl.cdiv(R, BLOCK_M), tl.cdiv(C, BLOCK_N), GROUP)
    units = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(starts_ptr + expert + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(tl.load(starts_ptr + expert), end, BLOCK_INNER):
        rows = first + tl.arange(0, BLOCK_INNER)
        a_tile = load_tile(a_ptr, rows, units, R, 1, end, R)
        b_tile = load_tile(b_ptr, rows, cols, C, 1, end, C)
        acc = add_product(acc, a_tile.T, b_tile, zero, INPUT_PRECISION)
    store_tile(out_ptr + expert.to(tl.int64) * stride_oe, acc, units, cols, stride_om, stride_on, R, C)


@triton.jit
def _experts_sums_kernel(
    a_ptr, weights_ptr, starts_ptr, out_ptr, stride_oe, stride_on, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    tile_columns = tl.cdiv(C, COLUMNS)
    expert = tl.program_id(0) // tile_columns
    cols = tl.program_id(0) % tile_columns * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(starts_ptr + expert + 1)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(tl.load(starts_ptr + expert), end, ROWS):
        rows = first + tl.arange(0, ROWS)
        values = load_tile(a_ptr, rows, cols, C, 1, end, C).to(tl.float32)
        if weights_ptr is not None:
            values *= tl.load(weights_ptr + rows, mask=rows < end, other=0.0)[:, None]
        sums += values
    target = out_ptr + expert.to(tl.int64) * stride_oe + cols.to(tl.int64) * stride_on
    tl.store(target, tl.sum(sums, 0).to(out_ptr.dtype.element_ty), mask=cols < C)


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: SortedRows,
    out: torch.Tensor,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: CooperativePipeline | None = None,
    order: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Fills ``out[e] = a_eᵀ b_e``, a view ``[E, R, C]`` of any strides, from contiguous a ``[P, R]`` and b ``[P, C]``.

    An expert without rows gets zeros. ``order`` names the experts in that of their work, for the pipelined kernel.
    ``name`` tells the gradients of one call apart in ``ready``.
    """
    if pipeline is not None and sm90.weight_gradient(
        a, b, rows, out, config=pipeline, ready=ready, name=name, order=order
    ):  # fmt: skip
        return
    experts, units, columns = out.shape

    def make() -> Launch:
        return Launch(
            _experts_weight_gradient_kernel,
            experts * ceil_div(units, tiles.block_m) * ceil_div(columns, tiles.block_n),
            (*out.stride(), units, columns),
            (0.0,),
            (tiles.block_m, tiles.block_n, tiles.block_inner, GROUP, input_precision),
            tiles.num_warps,
            tiles.num_stages,
        )

    prepared(ready, ("weight gradient", name), make)((a, b, rows.starts, out))


def expert_sums(
    a: torch.Tensor,
    row_weights: torch.Tensor | None,
    rows: SortedRows,
    out: torch.Tensor,
    *,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Fills ``out[e]``, a view ``[E, C]`` of any strides, with the sums of each expert's rows of a ``[P, C]``.

    With ``row_weights`` ``[P]`` rows are multiplied by theirs first. Float32 sums in a fixed order, rounded once.
    """
    experts, columns = out.shape

    def make() -> Launch:
        programs = experts * ceil_div(columns, _SUM_COLUMNS)
        return Launch(_experts_sums_kernel, programs, (*out.stride(), columns), (), (_SUM_ROWS, _SUM_COLUMNS))

    prepared(ready, ("expert sums", name), make)((a, row_weights, rows.starts, out))
