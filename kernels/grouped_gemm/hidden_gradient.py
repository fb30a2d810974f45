"""dZ and dG from dY and the pre-activations, with what the gradients of w_down and of the tokens' weights need."""

from typing import Any

import torch

from ..activations import activation_unit, through_activation
from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..tiles import grouped_tile, load_tile, only_before, store_tile
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from . import sm90
from .elements import Arithmetic, HiddenGradients, add_rows_times_weight, hidden_and_slopes
from .hidden import GROUP
from .sorting import SortedRows


@triton.jit(do_not_specialize=["row_tiles", "zero", "limit", "offset"])
def _experts_hidden_gradient_kernel(
    dy_ptr, down_ptr, z_ptr, g_ptr, weights_ptr, slots_ptr, tile_expert_ptr, dz_ptr, dg_ptr, hidden_ptr, partials_ptr,
    stride_de, stride_dk, stride_dn, K, N, row_tiles, zero, limit, offset,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    CLAMPED: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = g_ptr is not None
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    tile_columns = tl.cdiv(N, BLOCK_N)
    row, column = grouped_tile(tl.program_id(0), row_tiles, tile_columns, GROUP)
    first = row * BLOCK_M
    expert = tl.load(tile_expert_ptr + first // BLOCK).to(tl.int64)
    if expert >= 0:
        rows = first + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        limit_row = first + BLOCK_M
        # Padding is behind all rows of an expert: a tile that begins with it has nothing but zeros.
        inner = tl.where(tl.load(slots_ptr + first) >= 0, K, 0)
        d_hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        d_hidden = add_rows_times_weight(
            d_hidden, dy_ptr, down_ptr + expert * stride_de, rows, cols, K, 1, stride_dn, stride_dk, limit_row, N,
            inner, zero, BLOCK_INNER, INPUT_PRECISION,
        )  # fmt: skip
        # Nobody wrote the pre-activations of padding, and 0 times an infinite weight is NaN.
        filled = tl.load(slots_ptr + rows) >= 0
        known = filled[:, None] & (cols < N)[None, :]
        sources = tl.where(filled, rows, limit_row)
        weights = tl.load(weights_ptr + rows)[:, None]
        z = load_tile(z_ptr, sources, cols, N, 1, limit_row, N).to(tl.float32)
        if GATED:
            g = load_tile(g_ptr, sources, cols, N, 1, limit_row, N).to(tl.float32)
            hidden, slope, gate_slope = hidden_and_slopes(z, g, limit, offset, True, CLAMPED, ACTIVATION, ACCURACY)
            scaled = d_hidden * weights
            dz = scaled * slope
            dg = through_activation(scaled, gate_slope, g, ACTIVATION)
            store_tile(dg_ptr, tl.where(known, dg * UNIT, 0.0), rows, cols, N, 1, limit_row, N)
        else:
            hidden, slope, _ = hidden_and_slopes(z, z, limit, offset, False, CLAMPED, ACTIVATION, ACCURACY)
            dz = through_activation(d_hidden * weights, slope, z, ACTIVATION)
        store_tile(dz_ptr, tl.where(known, dz * UNIT, 0.0), rows, cols, N, 1, limit_row, N)
        if hidden_ptr is not None:
            store_tile(hidden_ptr, tl.where(known, hidden * UNIT * weights, 0.0), rows, cols, N, 1, limit_row, N)
        if partials_ptr is not None:
            # What it is of padding, nobody reads.
            sums = tl.sum(only_before(d_hidden, cols, N, False) * (hidden * UNIT), 1)
            tl.store(partials_ptr + column.to(tl.int64) * row_tiles * BLOCK_M + rows, sums)


def hidden_gradient(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    g: torch.Tensor | None,
    row_weights: torch.Tensor,
    rows: SortedRows,
    keep_hidden: bool,
    want_weights: bool,
    arithmetic: Arithmetic,
    *,
    in_place: bool,
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> HiddenGradients:
    """From sorted rows dy ``[P, K]``, w_down ``[E, K, N]``, a view of any strides, and z and g ``[P, N]``.

    ``row_weights`` ``[P]``, float32, are what the results of the experts are multiplied by. ``keep_hidden`` asks for
    w ⊙ H, ``want_weights`` for the partial sums. ``in_place`` dz and dg replace z and g.
    """
    if pipeline is not None:
        found = sm90.hidden_gradient(
            dy, w_down, z, g, row_weights, rows, keep_hidden, want_weights, arithmetic, in_place=in_place,
            config=pipeline, ready=ready,
        )  # fmt: skip
        if found is not None:
            return found
    _, inner, columns = w_down.shape
    tile_columns = ceil_div(columns, tiles.block_n)

    def make() -> Launch:
        row_tiles = rows.capacity // tiles.block_m
        return Launch(
            _experts_hidden_gradient_kernel,
            row_tiles * tile_columns,
            (*w_down.stride(), inner, columns),
            (row_tiles, 0.0, *arithmetic.numbers),
            (
                rows.block, tiles.block_m, tiles.block_n, tiles.block_inner, GROUP, arithmetic.clamped,
                arithmetic.activation, arithmetic.accuracy, arithmetic.input_precision,
            ),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    launch = prepared(ready, ("hidden gradient", keep_hidden, want_weights), make)
    dz, dg = (z, g) if in_place else (torch.empty_like(z), None if g is None else torch.empty_like(g))
    weighted = torch.empty_like(z) if keep_hidden else None
    partials = row_weights.new_empty(tile_columns, rows.capacity) if want_weights else None
    launch((dy, w_down, z, g, row_weights, rows.slots, rows.tile_expert, dz, dg, weighted, partials))
    return HiddenGradients(dz, dg, weighted, partials)
