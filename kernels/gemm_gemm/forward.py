"""Forward: y, one pass over x, the hidden alive one tile at a time."""

import torch

from ..activations import activation_unit, hidden_and_slopes
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, prepared
from ..tiles import add_product, batch_and_tile, in_units, load_tile, load_vector, product, store_tile, strides_in_units
from ..tuning import TileConfig
from . import sm90
from .operands import Operands, dense_strides, rows_of, stride, strides, unit_stride


@triton.jit(do_not_specialize=["M", "dropout"])
def _forward_kernel(
    x_ptr, up_ptr, gate_ptr, down_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, down_bias_ptr, residual_ptr, y_ptr,
    x_strides, up_strides, gate_strides, down_strides, bias_strides, stride_down_bias, residual_strides, y_strides,
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
    stride_rz, stride_rm, stride_ro = strides_in_units(residual_strides, False, UNIT)
    stride_yz, stride_ym, stride_yo = strides_in_units(y_strides, False, UNIT)
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
    acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for n in tl.range(0, N, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        up_tile = load_tile(up_ptr, inner, cols, stride_uk, stride_un, K, N)
        z = product(x_tile, up_tile, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += load_vector(up_bias_ptr, cols, stride_up_bias, N)[None, :]
        z_gate = z
        if GATED:
            gate_tile = load_tile(gate_ptr, inner, cols, stride_gk, stride_gn, K, N)
            z_gate = product(x_tile, gate_tile, INPUT_PRECISION)
            if gate_bias_ptr is not None:
                z_gate += load_vector(gate_bias_ptr, cols, stride_gate_bias, N)[None, :]
        hidden, _, _ = hidden_and_slopes(z, z_gate, GATED, ACTIVATION, ACCURACY)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], drop_limit)
            hidden = hidden * kept * keep_scale
        if not EVEN_N:
            # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
            hidden = tl.where((cols < N)[None, :], hidden, 0.0)
        down_tile = load_tile(down_ptr, cols, outer, stride_dn, stride_do, N, O)
        acc = add_product(acc, hidden.to(down_tile.dtype), down_tile, zero, INPUT_PRECISION)
    acc *= activation_unit(ACTIVATION, ACCURACY)
    if down_bias_ptr is not None:
        acc += load_vector(down_bias_ptr, outer, stride_down_bias, O)[None, :]
    if residual_ptr is not None:
        acc += load_tile(residual_ptr + batch * stride_rz, rows, outer, stride_rm, stride_ro, M, O).to(tl.float32)
    store_tile(y_ptr + batch * stride_yz, acc, rows, outer, stride_ym, stride_yo, M, O)


def forward(
    operands: Operands, down_bias: torch.Tensor | None, residual: torch.Tensor | None, tiles: TileConfig
) -> torch.Tensor:
    """y ``[Z, M, O]``, contiguous, in the dtype of x; ``[M, O]`` where the operands have no batch."""
    shape, launch, on_sm90 = prepared(operands.ready, "forward", _prepare, operands, down_bias, residual, tiles)
    if on_sm90:
        return sm90.forward(operands, down_bias, residual, shape, launch)
    y = operands.x.new_empty(shape)
    launch((*operands.pointers(), down_bias, residual, y))
    return y


def _prepare(
    operands: Operands, down_bias: torch.Tensor | None, residual: torch.Tensor | None, tiles: TileConfig
) -> tuple[tuple[int, ...], Launch, bool]:
    """What all executions of one prepared call share: the shape of y, the launch, whether it is the sm90 one."""
    batch, rows, _, hidden, out_width = operands.sizes()
    shape = (*operands.x.shape[:-1], out_width)
    if tiles.sm90 is not None and (matrices := operands.matrices) is not None:
        added = None if residual is None else rows_of(residual)
        if (residual is None) == (added is None) and unit_stride(down_bias):
            return shape, sm90.prepare_forward(operands, matrices, added, tiles.sm90), True
    launch = Launch(
        _forward_kernel,
        batch * ceil_div(rows, tiles.block_m),
        (*operands.strides(), stride(down_bias), strides(residual), dense_strides(shape), hidden),
        (rows, operands.arithmetic.dropout()),
        operands.constants(tiles, hidden % tiles.block_n == 0, residual),
        tiles.num_warps,
        tiles.num_stages,
    )
    return shape, launch, False
