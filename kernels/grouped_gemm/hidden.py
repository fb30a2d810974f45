"""The hidden of experts from rows sorted by expert, and the pre-activations where a backward pass will read them."""

from typing import Any

import torch

from ..activations import activation_unit
from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..tiles import add_product, grouped_tile, load_tile, load_vector, store_tile
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from . import sm90
from .elements import Arithmetic, hidden_and_slopes
from .sorting import SortedRows

GROUP = 8  # tiles of rows below one another, before those to their right: they share weights in the cache


@triton.jit(do_not_specialize=["row_tiles", "M", "zero", "limit", "offset"])
def _experts_hidden_kernel(
    x_ptr, up_ptr, w_gate_ptr, up_bias_ptr, gate_bias_ptr, slots_ptr, tile_expert_ptr, hidden_ptr, z_ptr, g_ptr,
    stride_xm, stride_xk, stride_ue, stride_un, stride_uk, stride_ge, stride_gn, stride_gk, stride_ube, stride_ubn,
    stride_gbe, stride_gbn, K, N, row_tiles, M, zero, limit, offset,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr, GATHERED: tl.constexpr, CLAMPED: tl.constexpr, ACTIVATION: tl.constexpr,
    ACCURACY: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # Results are dense. ``zero`` is 0, which only the caller knows.
    GATED: tl.constexpr = w_gate_ptr is not None
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    row, column = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(N, BLOCK_N), GROUP)
    first = row * BLOCK_M
    expert = tl.load(tile_expert_ptr + first // BLOCK).to(tl.int64)
    used = expert >= 0
    if used:
        # Padding is behind all rows of an expert: nobody reads a tile that begins with it.
        used = tl.load(slots_ptr + first) >= 0
    if used:
        rows = first + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        if GATHERED:
            sources = rows
        else:
            slots = tl.load(slots_ptr + rows)
            sources = tl.where(slots >= 0, slots // TOP_K, M)
        up_ptr += expert * stride_ue
        if GATED:
            w_gate_ptr += expert * stride_ge
        z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_INNER):
            inner = k + tl.arange(0, BLOCK_INNER)
            x_tile = load_tile(x_ptr, sources, inner, stride_xm, stride_xk, M, K)
            up_tile = load_tile(up_ptr, inner, cols, stride_uk, stride_un, K, N)
            z = add_product(z, x_tile, up_tile, zero, INPUT_PRECISION)
            if GATED:
                gate_tile = load_tile(w_gate_ptr, inner, cols, stride_gk, stride_gn, K, N)
                g = add_product(g, x_tile, gate_tile, zero, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += load_vector(up_bias_ptr + expert * stride_ube, cols, stride_ubn, N)[None, :]
        if GATED:
            if gate_bias_ptr is not None:
                g += load_vector(gate_bias_ptr + expert * stride_gbe, cols, stride_gbn, N)[None, :]
        limit_row = first + BLOCK_M
        if z_ptr is not None:
            store_tile(z_ptr, z, rows, cols, N, 1, limit_row, N)
            if GATED:
                store_tile(g_ptr, g, rows, cols, N, 1, limit_row, N)
        hidden, _, _ = hidden_and_slopes(z, g if GATED else z, limit, offset, GATED, CLAMPED, ACTIVATION, ACCURACY)
        store_tile(hidden_ptr, hidden * UNIT, rows, cols, N, 1, limit_row, N)


def hidden(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    rows: SortedRows,
    keep: bool,
    arithmetic: Arithmetic,
    *,
    gathered: bool,
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, G) ``[P, N]``, contiguous; Z, and G with a gate, only to ``keep``.

    x has the sorted rows ``[P, K]`` where they are ``gathered``, else tokens ``[M, K]``; weights ``[E, N, K]`` and
    biases ``[E, N]`` are views of any strides. Nothing is written to tiles of padding.
    """
    if pipeline is not None and gathered:
        kept = sm90.hidden(
            x, w_up, w_gate, b_up, b_gate, rows, keep, arithmetic, config=pipeline, ready=ready
        )  # fmt: skip
        if kept is not None:
            return kept
    _, columns, inner = w_up.shape

    def make() -> Launch:
        row_tiles = rows.capacity // tiles.block_m
        biases = [(0, 0) if bias is None else bias.stride() for bias in (b_up, b_gate)]
        gate = (0, 0, 0) if w_gate is None else w_gate.stride()
        return Launch(
            _experts_hidden_kernel,
            row_tiles * ceil_div(columns, tiles.block_n),
            (*x.stride(), *w_up.stride(), *gate, *biases[0], *biases[1], inner, columns),
            (row_tiles, x.shape[0], 0.0, *arithmetic.numbers),
            (
                rows.block, rows.k, tiles.block_m, tiles.block_n, tiles.block_inner, GROUP, gathered,
                arithmetic.clamped, arithmetic.activation, arithmetic.accuracy, arithmetic.input_precision,
            ),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    launch = prepared(ready, ("hidden", keep, gathered), make)
    found = x.new_empty(rows.capacity, columns)
    z = torch.empty_like(found) if keep else None
    g = torch.empty_like(found) if keep and w_gate is not None else None
    launch((x, w_up, w_gate, b_up, b_gate, rows.slots, rows.tile_expert, found, z, g))
    return found, z, g
