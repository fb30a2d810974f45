"""Copies of rows from token order to expert order, and sums over the rows of a token or of an expert."""

from typing import Any

import torch

from ..device import tl, triton
from ..hopper import Scaled
from ..launching import Launch, ceil_div, prepared
from ..tiles import load_tile
from .sorting import SortedRows

# Columns per step of a program, and rows of padding per step.
_COLUMNS, _PADDING_ROWS = 2048, 16
_SCORE_SLOTS, _SCORE_COLUMNS = 16, 128
_SUM_ROWS, _SUM_COLUMNS = 32, 64


def _columns(width: int) -> int:
    return min(_COLUMNS, 1 << max(width - 1, 1).bit_length())


@triton.jit(do_not_specialize=["tiles"])
def _spread_kernel(
    x_ptr, scores_ptr, scale_ptr, slots_ptr, rows_ptr, tile_expert_ptr, xs_ptr, weights_ptr, scales_ptr, stride_m,
    stride_k, K, tiles, BLOCK: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PADDING_ROWS: tl.constexpr,
):  # fmt: skip
    # The first programs fill the padding of a tile: they take longest, so they start first. Each of the others copies
    # one token to all of its rows.
    program = tl.program_id(0)
    if program >= tiles:
        token = (program - tiles).to(tl.int64)
        for first in tl.range(0, K, COLUMNS):
            cols = first + tl.arange(0, COLUMNS)
            values = tl.load(x_ptr + token * stride_m + cols.to(tl.int64) * stride_k, mask=cols < K)
            for j in tl.static_range(TOP_K):
                row = tl.load(rows_ptr + token * TOP_K + j).to(tl.int64)
                tl.store(xs_ptr + row * K + cols, values, mask=(cols < K) & (row >= 0))
        if weights_ptr is not None:
            for j in tl.static_range(TOP_K):
                row = tl.load(rows_ptr + token * TOP_K + j)
                score = tl.load(scores_ptr + token * TOP_K + j).to(tl.float32)
                tl.store(weights_ptr + row, score, mask=row >= 0)
        if scales_ptr is not None:
            scale = tl.load(scale_ptr + token)
            for j in tl.static_range(TOP_K):
                row = tl.load(rows_ptr + token * TOP_K + j)
                tl.store(scales_ptr + row, scale, mask=row >= 0)
    elif tl.load(tile_expert_ptr + program) >= 0:
        last = program.to(tl.int64) * BLOCK + BLOCK - 1
        # Padding follows an expert's rows: a tile whose last row is used has none.
        if tl.load(slots_ptr + last) < 0:
            for start in tl.range(0, BLOCK, PADDING_ROWS):
                rows = program.to(tl.int64) * BLOCK + start + tl.arange(0, PADDING_ROWS)
                empty = tl.load(slots_ptr + rows) < 0
                if weights_ptr is not None:
                    tl.store(weights_ptr + rows, tl.zeros([PADDING_ROWS], tl.float32), mask=empty)
                if scales_ptr is not None:
                    tl.store(scales_ptr + rows, tl.zeros([PADDING_ROWS], tl.float32), mask=empty)
                for first in tl.range(0, K, 128):
                    cols = first + tl.arange(0, 128)
                    zeros = tl.zeros([PADDING_ROWS, 128], xs_ptr.dtype.element_ty)
                    target = xs_ptr + rows[:, None] * K + cols[None, :]
                    tl.store(target, zeros, mask=empty[:, None] & (cols < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def _combine_kernel(
    ys_ptr, scores_ptr, rows_ptr, y_ptr, K, M, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) // tl.cdiv(K, COLUMNS)
    cols = tl.program_id(0) % tl.cdiv(K, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + j).to(tl.int64)
        values = tl.load(ys_ptr + row * K + cols, mask=(cols < K) & (row >= 0), other=0.0).to(tl.float32)
        if scores_ptr is not None:
            # The weight of a slot without an expert is undefined.
            values *= tl.load(scores_ptr + token * TOP_K + j, mask=row >= 0, other=0.0).to(tl.float32)
        acc += values
    tl.store(y_ptr + token * K + cols, acc.to(y_ptr.dtype.element_ty), mask=cols < K)


@triton.jit(do_not_specialize=["slots", "T", "P"])
def _score_gradient_kernel(
    partials_ptr, rows_ptr, index_ptr, dy_ptr, bias_ptr, out_ptr, stride_be, stride_bk, K, slots, T, P,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    row = tl.load(rows_ptr + slot, mask=inside, other=-1).to(tl.int64)
    sums = tl.zeros([SLOTS], tl.float32)
    partial_ptr = partials_ptr + row
    for _ in tl.range(0, T):
        sums += tl.load(partial_ptr, mask=row >= 0, other=0.0)
        partial_ptr += P
    if bias_ptr is not None:
        expert = tl.load(index_ptr + slot, mask=row >= 0, other=0).to(tl.int64)
        products = tl.zeros([SLOTS, COLUMNS], tl.float32)
        for first in tl.range(0, K, COLUMNS):
            cols = first + tl.arange(0, COLUMNS)
            dy = load_tile(dy_ptr, slot // TOP_K, cols, K, 1, slots // TOP_K, K).to(tl.float32)
            offsets = expert[:, None] * stride_be + cols.to(tl.int64)[None, :] * stride_bk
            bias = tl.load(bias_ptr + offsets, mask=(cols < K)[None, :], other=0.0).to(tl.float32)
            products += dy * bias
        sums += tl.where(row >= 0, tl.sum(products, 1), 0.0)
    tl.store(out_ptr + slot, sums.to(out_ptr.dtype.element_ty), mask=inside)


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


def spread(
    x: torch.Tensor | Scaled, scores: torch.Tensor | None, rows: SortedRows, *, ready: dict[Any, Any] | None = None
) -> tuple[Any, torch.Tensor | None]:
    """The sorted rows ``[P, K]`` of x ``[M, K]``, of any strides, and the sorted ``scores`` ``[S]``, float32 ``[P]``.

    Padding is 0 in both. Every token is read once. Of a :class:`Scaled` both parts are sorted.
    """
    source, scale = (x.values.view(torch.int8), x.scale) if isinstance(x, Scaled) else (x, None)
    tokens, width = source.shape

    def make() -> Launch:
        tiles = rows.tile_expert.shape[0]
        return Launch(
            _spread_kernel,
            tokens + tiles,
            (*source.stride(), width),
            (tiles,),
            (rows.block, rows.k, _columns(width), _PADDING_ROWS),
        )

    launch = prepared(ready, ("spread", scores is None, scale is None), make)
    found = source.new_empty(rows.capacity, width)
    weights, scales = (
        None if each is None else source.new_empty(rows.capacity, dtype=torch.float32) for each in (scores, scale)
    )
    launch((source, scores, scale, rows.slots, rows.rows_of, rows.tile_expert, found, weights, scales))
    return found if scales is None else Scaled(found.view(torch.float8_e4m3fn), scales), weights


def combine(
    ys: torch.Tensor,
    scores: torch.Tensor | None,
    rows: SortedRows,
    *,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``Σ_j scores[m, j] ys[row of (m, j)]`` ``[M, K]`` from sorted rows ``[P, K]``, summed in float32.

    Without ``scores`` every row has weight 1.
    """
    tokens, width = rows.rows_of.shape[0] // rows.k, ys.shape[1]

    def make() -> Launch:
        columns = _columns(width)
        return Launch(_combine_kernel, tokens * ceil_div(width, columns), (width,), (tokens,), (rows.k, columns))

    launch = prepared(ready, ("combine", scores is None), make)
    y = ys.new_empty(tokens, width)
    launch((ys, scores, rows.rows_of, y))
    return y


def score_gradient(
    partials: torch.Tensor,
    index: torch.Tensor,
    dy: torch.Tensor,
    b_down: torch.Tensor | None,
    rows: SortedRows,
    dtype: torch.dtype,
    *,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """The gradient ``[S]`` of the tokens' weights: the sums of ``partials`` ``[T, P]``, plus ``dy · b_down[e]``."""
    slots, width = rows.rows_of.shape[0], dy.shape[1]

    def make() -> Launch:
        return Launch(
            _score_gradient_kernel,
            ceil_div(slots, _SCORE_SLOTS),
            (*((0, 0) if b_down is None else b_down.stride()), width),
            (slots, *partials.shape),
            (rows.k, _SCORE_SLOTS, _SCORE_COLUMNS),
        )

    launch = prepared(ready, "score gradient", make)
    found = dy.new_empty(slots, dtype=dtype)
    launch((partials, rows.rows_of, index, dy, b_down, found))
    return found


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

    With ``row_weights`` ``[P]`` the sums are weighted. Float32 sums in a fixed order, rounded once.
    """
    experts, columns = out.shape

    def make() -> Launch:
        programs = experts * ceil_div(columns, _SUM_COLUMNS)
        return Launch(_experts_sums_kernel, programs, (*out.stride(), columns), (), (_SUM_ROWS, _SUM_COLUMNS))

    prepared(ready, ("expert sums", name), make)((a, row_weights, rows.starts, out))
