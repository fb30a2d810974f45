"""Gradients of a reduced product, whose slopes are computed tile by tile and never stored.

With g = ∂L/∂D and W[p,r] = g[p] ∂D[p]/∂Z[p,r], Z the product with its biases:

    d_kept = W reduced     d_reduced = Wᵀ kept     d_kept_bias = Σ_r W     d_reduced_bias = Σ_p W

    sum, mean    W = g act'(z)                      logsumexp   W = g exp(c - D) act'(z)
    sumsq        W = 2 g c act'(z)                  max, min    W = g act'(z) at the index, else 0; absmax with the
                                                                sign of c too

For max, min and absmax, W has one nonzero value per kept row, at the index that the forward pass found: the first
kernel computes these values, and d_kept by gathering rows of reduced; d_reduced is a product with the one-hot matrix of
the values, built in registers: no atomics, the same bits every time. For the other operations W is computed from Z
again. One kernel multiplies either W: a program owns rows of the gradient and loops over the rows of the other operand.
"""

from torch import Tensor

from ..activations import activate, through_activation
from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.operands import Bias, Operand
from ..tiles import add_compensated, add_product, load_tile, product, store_tile
from ..tuning import ReduceConfig
from .operands import (
    ReduceOperands,
    add_biases,
    aligned_operand,
    entry_rows,
    gradient_weights,
    of_kept_rows,
    scores,
    unmasked,
)

_ROUTED = 32  # kept rows per program of the first kernel


@triton.jit(do_not_specialize=["P", "R"])
def _routing_kernel(
    kept_ptr, reduced_ptr, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    g_ptr, index_ptr, weight_ptr, d_kept_ptr,
    strides, P, R,
    OP: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    stride_kz, stride_kp, stride_kk = strides.kept
    stride_rz, stride_rr, stride_rk = strides.reduced
    program = tl.program_id(0)
    tiles = tl.cdiv(P, BLOCK_P)
    batch = (program // tiles).to(tl.int64)
    rows = (program % tiles) * BLOCK_P + tl.arange(0, BLOCK_P)
    row_ok = rows < P
    first_row, active_rows, _ = entry_rows(batch, lengths_ptr, offsets_ptr, strides.entries, R)
    index = tl.load(index_ptr + batch * P + rows, mask=row_ok, other=0)
    # If no row is reduced, the index is 0 and the result a constant.
    reduces = unmasked(mask_ptr, strides.mask, batch, index, row_ok & (index < active_rows))
    weight = tl.load(g_ptr + batch * P + rows, mask=reduces, other=0.0)
    kept_at = kept_ptr + batch * stride_kz + rows.to(tl.int64)[:, None] * stride_kp
    found_at = reduced_ptr + batch * stride_rz + (first_row + index)[:, None] * stride_rr
    if OP == "absmax" or ACTIVATION != "identity":
        z = tl.zeros([BLOCK_P], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
            inside = reduces[:, None] & (inner < K)
            kept_tile = tl.load(kept_at + inner * stride_kk, mask=inside, other=0.0).to(tl.float32)
            z += tl.sum(kept_tile * tl.load(found_at + inner * stride_rk, mask=inside, other=0.0).to(tl.float32), 1)
        if kept_bias_ptr is not None:
            z += tl.load(kept_bias_ptr + rows.to(tl.int64) * strides.bias[0], mask=reduces, other=0.0).to(tl.float32)
        if reduced_bias_ptr is not None:
            bias_at = reduced_bias_ptr + index.to(tl.int64) * strides.bias[1]
            z += tl.load(bias_at, mask=reduces, other=0.0).to(tl.float32)
        c, slope = activate(z, ACTIVATION, ACCURACY)
        if OP == "absmax":
            weight = tl.where(c < 0, -weight, tl.where(c > 0, weight, 0.0))  # NaN has no sign, as in torch
        weight = through_activation(weight, slope, z, ARITHMETIC)
        weight = tl.where(reduces, weight, 0.0)
    tl.store(weight_ptr + batch * P + rows, weight, mask=row_ok)
    if d_kept_ptr is not None:
        d_kept_at = d_kept_ptr + (batch * P + rows)[:, None] * K
        for k in tl.range(0, K, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
            inside = reduces[:, None] & (inner < K)
            found = tl.load(found_at + inner * stride_rk, mask=inside, other=0.0).to(tl.float32)
            # Rounded as W is for products on the matrix units.
            rounded = weight.to(d_kept_ptr.dtype.element_ty).to(tl.float32)
            gradient = (found * rounded[:, None]).to(d_kept_ptr.dtype.element_ty)
            tl.store(d_kept_at + inner, gradient, mask=row_ok[:, None] & (inner < K))


@triton.jit(do_not_specialize=["P", "R", "zero"])
def _weighted_kernel(
    kept_ptr, reduced_ptr, kept_bias_ptr, reduced_bias_ptr, mask_ptr, lengths_ptr, offsets_ptr,
    weight_ptr, index_ptr, result_ptr, d_rows_ptr, sums_ptr,
    strides, stride_dz, P, R, zero,
    KEPT: tl.constexpr, OP: tl.constexpr, K: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr, LAYOUTS: tl.constexpr,
    ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # The gradient is that of kept if KEPT, else that of reduced.
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    stride_kz, stride_kp, stride_kk, P = aligned_operand(strides.kept, P, LAYOUTS.kept_transposed, LAYOUTS.kept_unit)
    stride_rz, stride_rr, stride_rk, R = aligned_operand(
        strides.reduced, R, LAYOUTS.reduced_transposed, LAYOUTS.reduced_unit
    )  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(P if KEPT else R, BLOCK_ROWS)
    out_cols = (program % K_BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
    batch = (program // K_BLOCKS // tiles).to(tl.int64)
    row_start = (program // K_BLOCKS % tiles) * BLOCK_ROWS
    rows = row_start + tl.arange(0, BLOCK_ROWS)
    first_row, active_rows, entry = entry_rows(batch, lengths_ptr, offsets_ptr, strides.entries, R)
    kept = Operand(kept_ptr + batch * stride_kz, 0, stride_kp, stride_kk, P, K)
    reduced = Operand(
        reduced_ptr + batch * stride_rz + first_row * stride_rr, 0, stride_rr, stride_rk, active_rows, K
    )  # fmt: skip
    kept_bias = Bias(kept_bias_ptr, 0, strides.bias[0], P)
    reduced_bias = Bias(reduced_bias_ptr, 0, strides.bias[1], active_rows)
    if KEPT:
        own, other, own_bias, other_bias = kept, reduced, kept_bias, reduced_bias
        end = active_rows
        weight = of_kept_rows(weight_ptr, batch * P, rows, P, 1)
    else:
        own, other, own_bias, other_bias = reduced, kept, reduced_bias, kept_bias
        end = tl.where(row_start < active_rows, P, 0)
    if OP != "logsumexp":
        result = 0.0
    elif KEPT:
        result = of_kept_rows(result_ptr, batch * P, rows, P, 1)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    lost = tl.zeros([BLOCK_ROWS], tl.float32)
    if K <= BLOCK_K and OP != "index":
        own_tile = load_tile(
            own.ptr, rows, out_cols, own.stride_row, own.stride_inner, own.rows, K, EVEN_ROWS, K == BLOCK_K
        )  # fmt: skip
    for start in tl.range(0, end, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        tile = load_tile(
            other.ptr, cols, out_cols, other.stride_row, other.stride_inner, other.rows, K, EVEN_COLS, K % BLOCK_K == 0
        )  # fmt: skip
        if not KEPT:
            weight = of_kept_rows(weight_ptr, batch * P, cols, P, 0)
        if OP == "index":
            index = tl.load(index_ptr + batch * P + cols, mask=cols < P, other=-1)
            w = tl.where(rows[:, None] == index[None, :], weight, 0.0)
        else:
            if K <= BLOCK_K:
                z = product(own_tile, tile.T, INPUT_PRECISION)
            else:
                z = scores(own, other, rows, cols, zero, K, BLOCK_K, EVEN_ROWS, EVEN_COLS, INPUT_PRECISION)
            z = add_biases(z, rows, cols, own_bias, other_bias)
            if OP == "logsumexp" and not KEPT:
                result = of_kept_rows(result_ptr, batch * P, cols, P, 0)
            w = gradient_weights(z, weight, result, OP, ARITHMETIC)
            if mask_ptr is not None:
                masked = cols if KEPT else rows
                included = unmasked(mask_ptr, strides.mask, batch, masked, masked < active_rows)
                w = tl.where(tl.expand_dims(included, 0 if KEPT else 1), w, 0.0)
            if not EVEN_COLS:
                w = tl.where((cols < other.rows)[None, :], w, 0.0)
        if sums_ptr is not None:
            if ARITHMETIC.accuracy == "exact":
                sums, lost = add_compensated(sums, lost, tl.sum(w, 1))
            else:
                sums += tl.sum(w, 1)
        if d_rows_ptr is not None:
            acc = add_product(acc, w.to(tile.dtype), tile, zero, INPUT_PRECISION)
    if not KEPT:
        # Inactive rows have gradient 0.
        acc = tl.where((rows < active_rows)[:, None], acc, 0.0)
        sums = tl.where(rows < active_rows, sums, 0.0)
    limit = P if KEPT else entry
    if d_rows_ptr is not None:
        store_tile(d_rows_ptr + batch * stride_dz + first_row * (0 if KEPT else K), acc, rows, out_cols, K, 1, limit, K)
    if sums_ptr is not None:
        tl.store(sums_ptr + batch * (P if KEPT else R) + rows, sums, mask=(rows < limit) & (program % K_BLOCKS == 0))


def route(operands: ReduceOperands, g: Tensor, index: Tensor, *, kept_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """For max, min and absmax: (W at the index, float32 ``[Z, P]``; d_kept ``[Z, P, K]`` if requested).

    g is float32 ``[Z, P]``, index int32 ``[Z, P]``, both contiguous.
    """
    batch, kept, reduced, width = operands.sizes()
    weight = g.new_empty(batch, kept)
    d_kept = operands.kept.new_empty(batch, kept, width) if kept_gradient else None
    op, arithmetic = operands.arithmetic.op, operands.arithmetic.constants

    def prepare() -> Launch:
        return Launch(
            _routing_kernel,
            batch * ceil_div(kept, _ROUTED),
            (operands.strides(),),
            (kept, reduced),
            (op, width, _ROUTED, min(triton.next_power_of_2(width), 64), arithmetic),
        )

    launch = prepared(operands.ready, ("route", kept_gradient), prepare)
    launch((*operands.pointers(), g, index, weight, d_kept))
    return weight, d_kept


def kept_gradient(
    operands: ReduceOperands, g: Tensor, saved: Tensor | None, *, matrix: bool, bias: bool, tiles: ReduceConfig
) -> tuple[Tensor | None, Tensor | None]:
    """For sum, mean, sumsq and logsumexp: (d_kept ``[Z, P, K]``, Σ_r W float32 ``[Z, P]``), each if requested.

    g is float32 ``[Z, P]``, for mean already divided by the counts. For logsumexp, saved is D in float32, or the first
    half of the shares of :func:`reduce` with g already divided by the second half. Both are contiguous.
    """
    return _weighted(operands, True, operands.arithmetic.op, g, saved, matrix, bias, tiles)


def reduced_gradient(
    operands: ReduceOperands, g: Tensor, saved: Tensor | None, *, matrix: bool, bias: bool, tiles: ReduceConfig
) -> tuple[Tensor | None, Tensor | None]:
    """(d_reduced, of the shape of reduced and contiguous; Σ_p W float32 ``[Z, R]``), each if requested.

    For max, min and absmax g is the W of :func:`route` and saved the index; otherwise they are as in
    :func:`kept_gradient`.
    """
    indexed = operands.arithmetic.op in ("max", "min", "absmax")
    return _weighted(operands, False, "index" if indexed else operands.arithmetic.op, g, saved, matrix, bias, tiles)


def _weighted(
    operands: ReduceOperands,
    of_kept: bool,
    op: str,
    g: Tensor,
    saved: Tensor | None,
    matrix: bool,
    bias: bool,
    tiles: ReduceConfig,
) -> tuple[Tensor | None, Tensor | None]:
    batch, kept, reduced, width = operands.sizes()
    rows = kept if of_kept else reduced
    # Packed rows are consecutive, whichever entry they belong to.
    shape = operands.reduced.shape if operands.reduced.dim() == 2 and not of_kept else (batch, rows, width)
    d_rows = operands.kept.new_empty(shape) if matrix else None
    sums = g.new_empty(batch, rows) if bias else None
    launch = prepared(
        operands.ready, ("weighted", of_kept, matrix, bias), _prepare_weighted, operands, of_kept, op, tiles
    )
    index, result = (saved, None) if op == "index" else (None, saved)
    launch((*operands.pointers(), g, index, result, d_rows, sums))
    return d_rows, sums


def _prepare_weighted(operands: ReduceOperands, of_kept: bool, op: str, tiles: ReduceConfig) -> Launch:
    batch, kept, reduced, width = operands.sizes()
    rows, cols = (kept, reduced) if of_kept else (reduced, kept)
    packed = operands.reduced.dim() == 2 and not of_kept
    even_rows = (operands.whole or of_kept) and rows % tiles.block_p == 0
    even_cols = (operands.whole or not of_kept) and cols % tiles.block_r == 0
    return Launch(
        _weighted_kernel,
        batch * ceil_div(rows, tiles.block_p) * ceil_div(width, tiles.block_k),
        (operands.strides(), 0 if packed else rows * width),
        (kept, reduced, 0.0),
        (
            of_kept, op, width, tiles.block_p, tiles.block_r, tiles.block_k, even_rows, even_cols,
            operands.layouts(), operands.arithmetic.constants,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
