"""Data gradient: dx, one pass over x and dy, the hidden and its gradient recomputed tile by tile."""

from typing import Any

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, layout_of, prepared
from ..tiles import add_product, batch_and_tile, in_units, load_tile, load_vector, product, store_tile, strides_in_units
from ..tuning import TileConfig
from . import sm90
from .operands import Operands, dense_strides, rows_of, strides


@triton.jit(do_not_specialize=["M", "dropout"])
def _data_gradient_kernel(
    x_ptr, up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, dy_ptr, dx_ptr,
    x_strides, up_strides, gate_strides, down_strides, bias_strides, dy_strides, dx_strides,
    N, M, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTHS: tl.constexpr, EVEN_N: tl.constexpr,
    ARITHMETIC: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = WIDTHS[0]
    O: tl.constexpr = WIDTHS[1]
    BLOCK_K: tl.constexpr = WIDTHS[2]
    BLOCK_O: tl.constexpr = WIDTHS[3]
    ACTIVATION: tl.constexpr = ARITHMETIC[0]
    ACCURACY: tl.constexpr = ARITHMETIC[1]
    INPUT_PRECISION: tl.constexpr = ARITHMETIC[2]
    UP_TRANSPOSED: tl.constexpr = LAYOUT[0]
    DOWN_TRANSPOSED: tl.constexpr = LAYOUT[1]
    UNIT: tl.constexpr = LAYOUT[2]
    stride_xz, stride_xm, stride_xk = strides_in_units(x_strides, False, UNIT)
    N = in_units(N, UNIT)
    stride_up_bias, stride_gate_bias = bias_strides
    stride_uz, stride_un, stride_uk = strides_in_units(up_strides, UP_TRANSPOSED, UNIT)
    stride_gz, stride_gn, stride_gk = strides_in_units(gate_strides, UP_TRANSPOSED, UNIT)
    stride_dz, stride_do, stride_dn = strides_in_units(down_strides, DOWN_TRANSPOSED, UNIT)
    stride_dyz, stride_dym, stride_dyo = strides_in_units(dy_strides, False, UNIT)
    stride_dxz, stride_dxm, stride_dxk = strides_in_units(dx_strides, False, UNIT)
    batch, row_start = batch_and_tile(M, BLOCK_M)
    rows = row_start + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    drop_limit, keep_scale = dropout
    zero = keep_scale - keep_scale
    outer = tl.arange(0, BLOCK_O)
    GATED: tl.constexpr = gate_ptr is not None
    up_ptr += batch * stride_uz
    down_ptr += batch * stride_dz
    if GATED:
        gate_ptr += batch * stride_gz
    x_tile = load_tile(x_ptr + batch * stride_xz, rows, inner, stride_xm, stride_xk, M, K)
    dy_tile = load_tile(dy_ptr + batch * stride_dyz, rows, outer, stride_dym, stride_dyo, M, O)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for n in tl.range(0, N, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        up_tile = load_tile(up_ptr, cols, inner, stride_un, stride_uk, N, K)
        down_tile = load_tile(down_ptr, outer, cols, stride_do, stride_dn, O, N)
        z = product(x_tile, up_tile.T, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += load_vector(up_bias_ptr, cols, stride_up_bias, N)[None, :]
        d_hidden = product(dy_tile, down_tile, INPUT_PRECISION)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], drop_limit)
            d_hidden = d_hidden * kept * keep_scale
        z_gate = z
        if GATED:
            gate_tile = load_tile(gate_ptr, cols, inner, stride_gn, stride_gk, N, K)
            z_gate = product(x_tile, gate_tile.T, INPUT_PRECISION)
            if gate_bias_ptr is not None:
                z_gate += load_vector(gate_bias_ptr, cols, stride_gate_bias, N)[None, :]
        _, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
        if GATED:
            dz = d_hidden * slope
        else:
            dz = through_activation(d_hidden, slope, z, ACTIVATION)
        if not EVEN_N:
            dz = tl.where((cols < N)[None, :], dz, 0.0)
        acc = add_product(acc, dz.to(up_tile.dtype), up_tile, zero, INPUT_PRECISION)
        if GATED:
            dz_gate = through_activation(d_hidden, gate_slope, z_gate, ACTIVATION)
            if not EVEN_N:
                dz_gate = tl.where((cols < N)[None, :], dz_gate, 0.0)
            acc = add_product(acc, dz_gate.to(gate_tile.dtype), gate_tile, zero, INPUT_PRECISION)
    acc *= activation_unit(ACTIVATION, ACCURACY)
    store_tile(dx_ptr + batch * stride_dxz, acc, rows, inner, stride_dxm, stride_dxk, M, K)


def data_gradient(
    operands: Operands, dy: torch.Tensor, tiles: TileConfig, column_sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx, contiguous, of the shape of x, from dy ``[Z, M, O]`` (or ``[M, O]``) of any strides.

    With it, where ``column_sums`` asks for them and the kernel that runs reads dy only once, the sums of dy over all of
    its rows, ``[O]``; else None.
    """
    name = ("data gradient", column_sums, *layout_of(dy))
    made = prepared(operands.ready, name, _prepare, operands, dy, tiles, column_sums)
    if not isinstance(made, Launch):
        return sm90.data_gradient(operands, dy, made)
    x = operands.x
    dx = x.new_empty(x.shape)
    made((*operands.pointers(), dy, dx))
    return dx, None


def _prepare(operands: Operands, dy: torch.Tensor, tiles: TileConfig, column_sums: bool) -> Any:
    """What the sm90 kernel prepares, or the launch of the generic one."""
    if tiles.sm90 is not None and (matrices := operands.matrices) is not None:
        dy_rows = rows_of(dy)
        if dy_rows is not None:
            return sm90.prepare_data_gradient(operands, matrices, dy_rows, column_sums, tiles.sm90)
    batch, rows, _, hidden, _ = operands.sizes()
    return Launch(
        _data_gradient_kernel,
        batch * ceil_div(rows, tiles.block_m),
        (*operands.strides(), strides(dy), dense_strides(operands.x.shape), hidden),
        (rows, operands.arithmetic.dropout()),
        operands.constants(tiles, hidden % tiles.block_n == 0, dy),
        tiles.num_warps,
        tiles.num_stages,
    )
