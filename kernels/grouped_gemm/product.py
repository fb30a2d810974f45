"""Products of rows sorted by expert with their expert's weight: the second projection, and the gradient of the rows."""

from collections.abc import Sequence
from typing import Any

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..tiles import grouped_tile, load_vector, store_tile
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from . import sm90
from .elements import add_rows_times_weight
from .hidden import GROUP
from .sorting import SortedRows


@triton.jit(do_not_specialize=["row_tiles", "zero"])
def _experts_product_kernel(
    a_ptr, w_ptr, other_ptr, w_other_ptr, bias_ptr, slots_ptr, tile_expert_ptr, out_ptr,
    stride_we, stride_wn, stride_wk, stride_oe, stride_on, stride_ok, stride_be, stride_bn, inner, N, row_tiles, zero,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    row, column = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(N, BLOCK_N), GROUP)
    first = row * BLOCK_M
    expert = tl.load(tile_expert_ptr + first // BLOCK).to(tl.int64)
    used = expert >= 0
    if used:
        used = tl.load(slots_ptr + first) >= 0
    if used:
        rows = first + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        limit_row = first + BLOCK_M
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = add_rows_times_weight(
            acc, a_ptr, w_ptr + expert * stride_we, rows, cols, inner, 1, stride_wn, stride_wk, limit_row, N, inner,
            zero, BLOCK_INNER, INPUT_PRECISION,
        )  # fmt: skip
        if other_ptr is not None:
            acc = add_rows_times_weight(
                acc, other_ptr, w_other_ptr + expert * stride_oe, rows, cols, inner, 1, stride_on, stride_ok,
                limit_row, N, inner, zero, BLOCK_INNER, INPUT_PRECISION,
            )  # fmt: skip
        if bias_ptr is not None:
            acc += load_vector(bias_ptr + expert * stride_be, cols, stride_bn, N)[None, :]
        store_tile(out_ptr, acc, rows, cols, N, 1, limit_row, N)


def product(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    rows: SortedRows,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: CooperativePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``Σ a wᵀ + bias`` ``[P, out]`` over one or two pairs of contiguous rows a ``[P, in]`` and w ``[E, out, in]``.

    Weights and the bias ``[E, out]`` are views of any strides. Nothing is written to tiles of padding.
    """
    if pipeline is not None:
        found = sm90.product(pairs, bias, rows, config=pipeline, ready=ready)
        if found is not None:
            return found
    [(a, w), *more] = pairs
    other, w_other = more[0] if more else (None, None)
    _, columns, inner = w.shape

    def make() -> Launch:
        row_tiles = rows.capacity // tiles.block_m
        return Launch(
            _experts_product_kernel,
            row_tiles * ceil_div(columns, tiles.block_n),
            (
                *w.stride(), *((0, 0, 0) if w_other is None else w_other.stride()),
                *((0, 0) if bias is None else bias.stride()), inner, columns,
            ),
            (row_tiles, 0.0),
            (rows.block, tiles.block_m, tiles.block_n, tiles.block_inner, GROUP, input_precision),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    launch = prepared(ready, ("product", len(pairs)), make)
    out = a.new_empty(rows.capacity, columns)
    launch((a, w, other, w_other, bias, rows.slots, rows.tile_expert, out))
    return out
