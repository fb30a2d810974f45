"""dZ and dZg from dH = dy W_down and the pre-activations, with sums for the gradients of biases or routing weights.

    dZ = dH ⊙ act'(Z),  gated dH ⊙ act(Zg)       dZg = dH ⊙ Z ⊙ act'(Zg)

Dense rows: a program owns a band of tiles below one another and sums dZ and dZg over its rows: partial gradients of the
biases. Rows sorted by expert: dH is multiplied by the routing weight of its row; the sums of the unweighted dH ⊙ H over
the columns of a tile are partial gradients of that weight.
"""

from typing import NamedTuple

import torch

from ...activations import activation_unit, limited_hidden_and_slopes, through_activation
from ...device import tl, triton
from ...dropout import NO_DROPOUT, Dropout, DropoutNumbers, keep_factor
from ...launching import Launch, ceil_div, vector_unit
from ...tiles import assume_multiple, grouped_tile, load_tile, only_before, store_tile
from ...tuning import EpilogueTiles
from ...tuning.grouped_gemm import GroupedTiles
from ..arithmetic import Arithmetic
from .mainloop import multiply
from .operands import GradientOutputs, Operand, PreActivations, SortedTokens, strides
from .schedules import GROUP, end_of_rows, swizzled_tile


@triton.jit
def _stored_and_summed(
    ptr, gradient, filled, rows, cols, stride_m, row_limit, N, UNIT: tl.constexpr, SUMMED: tl.constexpr
):  # fmt: skip
    """Store a tile of dZ or dZg, with zeros in rows not ``filled``; return it or, if ``SUMMED``, its sum over rows.

    It is summed right away: kept for later, the tile would occupy registers that the code in between needs.
    """
    # The product of such a row is 0, but NaN if a weight is infinite.
    gradient = tl.where(filled[:, None], gradient * UNIT, 0.0)
    store_tile(ptr, gradient, rows, cols, stride_m, 1, row_limit, N)
    if SUMMED:
        return tl.sum(gradient, 0)
    else:
        return gradient


@triton.jit
def _gradient_tile(
    first_row, cols, expert, dy, down, pre, out, tokens, dropout, limits, zero, totals,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GATED: tl.constexpr,
    ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Store one tile of dZ and dZg; return ``totals`` plus its sums over rows, or plus the tile if BLOCK_INNER is 0."""
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    MULTIPLIES: tl.constexpr = BLOCK_INNER != 0
    UNIT: tl.constexpr = activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    M, N = dy.rows, down.rows
    rows = first_row + tl.arange(0, BLOCK_M)
    row_limit = end_of_rows(tokens.slots_ptr, first_row, M, BLOCK_M)
    if pre.added_ptr is None:
        d_hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        d_hidden = load_tile(pre.added_ptr, rows, cols, N, 1, M, N).to(tl.float32)
    if MULTIPLIES:
        end = dy.inner
        if tokens.slots_ptr is not None:
            # The product of a tile of padding only is not needed.
            end = tl.where(tl.load(tokens.slots_ptr + first_row) >= 0, end, 0)
        left = Operand(dy.ptr, 0, dy.stride_row, dy.stride_inner, row_limit, end)
        right = Operand(down.ptr, down.stride_batch, down.stride_row, down.stride_inner, N, end)
        d_hidden = multiply(d_hidden, left, right, rows, cols, expert, 0, end, zero, BLOCK_INNER, INPUT_PRECISION)
    else:
        d_hidden += load_tile(out.dz_ptr, rows, cols, out.stride, 1, M, N).to(tl.float32)
    sources, scaled = rows, d_hidden
    if dropout.seed_ptr is not None:
        factor = keep_factor(dropout, rows, cols)
        scaled *= factor
    if tokens.slots_ptr is not None:
        # The pre-activations of padding were never written.
        filled = tl.load(tokens.slots_ptr + rows) >= 0
        sources = tl.where(filled, rows, row_limit)
        weights = tl.load(tokens.weights_ptr + rows)[:, None]
        scaled = d_hidden * weights
    z = load_tile(pre.z_ptr, sources, cols, pre.stride_zm, pre.stride_zn, row_limit, N).to(tl.float32)
    z_gate = z
    if GATED:
        z_gate = load_tile(pre.gate_ptr, sources, cols, pre.stride_gm, pre.stride_gn, row_limit, N).to(tl.float32)
    hidden, slope, gate_slope = limited_hidden_and_slopes(z, z_gate, limits, GATED, ARITHMETIC)
    dz = scaled * slope if GATED else through_activation(scaled, slope, z, ARITHMETIC)
    if tokens.slots_ptr is None:
        filled = rows < row_limit
    sums = totals[0] + _stored_and_summed(
        out.dz_ptr, dz, filled, rows, cols, out.stride, row_limit, N, UNIT, MULTIPLIES
    )
    gate_sums = totals[1]
    if GATED:
        d_gate = through_activation(scaled, gate_slope, z_gate, ARITHMETIC)
        gate_sums += _stored_and_summed(
            out.d_gate_ptr, d_gate, filled, rows, cols, out.stride, row_limit, N, UNIT, MULTIPLIES
        )  # fmt: skip
    if out.hidden_ptr is not None:
        kept = hidden
        if dropout.seed_ptr is not None:
            kept *= factor
        kept *= UNIT
        if tokens.slots_ptr is not None:
            kept = tl.where(filled[:, None], kept * weights, 0.0)
        store_tile(out.hidden_ptr, kept, rows, cols, out.stride_hidden, 1, row_limit, N)
    if tokens.sums_ptr is not None:
        # The sums of padding rows are never read.
        row_sums = tl.sum(only_before(d_hidden, cols, N, False) * (hidden * UNIT), 1)
        tl.store(tokens.sums_ptr + tokens.column.to(tl.int64) * M + rows, row_sums)
    return sums, gate_sums


class _Strides(NamedTuple):
    """The strides of the operands, and the row strides of the results: dZ and dZg, and the hidden."""

    dy: tuple[int, ...]
    down: tuple[int, ...]
    z: tuple[int, ...]
    gate: tuple[int, ...]
    gradients: int
    hidden: int


@triton.jit(do_not_specialize=["M", "row_tiles", "zero", "dropout", "limits"])
def _hidden_gradient_kernel(
    dy_ptr, down_ptr, z_ptr, gate_ptr, dz_ptr, d_gate_ptr, hidden_ptr, sums_ptr, seed_ptr, added_ptr, tile_expert_ptr,
    slots_ptr, weights_ptr, weight_sums_ptr, strides, O, N, M, row_tiles, zero, dropout, limits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # Dense rows: a program has ``row_tiles`` tiles below one another. ``zero`` is 0 at run time only (``add_product``).
    # With a BLOCK_INNER of 0, dH is read from the memory of dZ, and tiles are summed elementwise before their rows are.
    GATED: tl.constexpr = gate_ptr is not None
    stride_zm, stride_gm = assume_multiple(strides.z[0], VECTOR), assume_multiple(strides.gate[0], VECTOR)
    tile_columns = tl.cdiv(N, BLOCK_N)
    N = assume_multiple(N, VECTOR)
    dy = Operand(dy_ptr, 0, *strides.dy, M, O)
    down = Operand(down_ptr, strides.down[0], strides.down[2], strides.down[1], N, O)
    pre = PreActivations(z_ptr, gate_ptr, added_ptr, stride_zm, strides.z[1], stride_gm, strides.gate[1])
    gradient_stride, hidden_stride = assume_multiple(strides.gradients, VECTOR), assume_multiple(strides.hidden, VECTOR)
    out = GradientOutputs(dz_ptr, d_gate_ptr, hidden_ptr, gradient_stride, hidden_stride)
    drop = DropoutNumbers(seed_ptr, *dropout)
    if BLOCK_INNER != 0:
        sums = tl.zeros([BLOCK_N], tl.float32)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_sums = sums
    if tile_expert_ptr is not None:
        row, column = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
        expert = tl.load(tile_expert_ptr + row * BLOCK_M // BLOCK).to(tl.int64)
        if expert >= 0:
            cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
            tokens = SortedTokens(slots_ptr, weights_ptr, weight_sums_ptr, column)
            _gradient_tile(
                row * BLOCK_M, cols, expert, dy, down, pre, out, tokens, drop, limits, zero,
                (sums, gate_sums), BLOCK_M, BLOCK_N, BLOCK_INNER, GATED, ARITHMETIC,
            )  # fmt: skip
    else:
        bands = tl.cdiv(tl.cdiv(M, BLOCK_M), row_tiles)
        band, column = grouped_tile(tl.program_id(0), bands, tile_columns, GROUP)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        first_row = (band.to(tl.int64) * row_tiles * BLOCK_M).to(tl.int32)
        dense = SortedTokens(None, None, None, None)
        for index in range(tl.minimum(row_tiles, tl.cdiv(M - first_row, BLOCK_M))):
            sums, gate_sums = _gradient_tile(
                first_row + index * BLOCK_M, cols, 0, dy, down, pre, out, dense, drop, limits, zero,
                (sums, gate_sums), BLOCK_M, BLOCK_N, BLOCK_INNER, GATED, ARITHMETIC,
            )  # fmt: skip
        if sums_ptr is not None:
            if BLOCK_INNER == 0:
                sums, gate_sums = tl.sum(sums, 0), tl.sum(gate_sums, 0)
            if GATED:
                partial = sums_ptr + band.to(tl.int64) * 2 * N
                tl.store(partial + N + cols, gate_sums, mask=cols < N)
            else:
                partial = sums_ptr + band.to(tl.int64) * N
            tl.store(partial + cols, sums.to(sums_ptr.dtype.element_ty), mask=cols < N)


def prepare_hidden_gradient(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    pre: tuple[torch.Tensor, torch.Tensor | None],
    row_strides: tuple[int, int],
    arithmetic: Arithmetic,
    tiles: EpilogueTiles | GroupedTiles,
    *,
    row_tiles: int = 1,
    dropout: Dropout = NO_DROPOUT,
    block: int = 1,
) -> Launch:
    """The launch for dy ``[M, O]``, w_down ``[O, N]`` or ``[E, O, N]``, and Z and Zg ``[M, N]``.

    ``row_strides`` are those of dZ and dZg, and of the hidden; sorted rows are in blocks of ``block``. Its tensors are
    dy, w_down, Z, Zg, dZ, dZg, hidden, sums, the dropout's seed, the addend of dH, and for sorted rows the experts of
    tiles, slots, routing weights and the sums for their gradients: None for those that are absent.
    """
    (rows, inner), columns = dy.shape, w_down.shape[-1]
    z, gate = pre
    laid_out = _Strides(dy.stride(), strides(w_down, 3), z.stride(), strides(gate, 2), *row_strides)
    # No hint beside a product: its accumulator leaves too few registers for vectorised rows.
    vector = 1 if tiles.block_inner else vector_unit(z, columns, *row_strides, laid_out.z[0], laid_out.gate[0])
    return Launch(
        _hidden_gradient_kernel,
        ceil_div(ceil_div(rows, tiles.block_m), row_tiles) * ceil_div(columns, tiles.block_n),
        (laid_out, inner, columns),
        (rows, row_tiles, 0.0, dropout.numbers(), arithmetic.numbers),
        (tiles.block_m, tiles.block_n, tiles.block_inner, vector, block, arithmetic.constants),
        tiles.num_warps,
        tiles.num_stages,
    )
