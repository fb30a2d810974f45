"""Data gradient: dx, one pass over x and dy, the hidden and its gradient recomputed tile by tile."""

from typing import Any

import torch

from ..activations import activation_unit, hidden_and_slopes, through_activation
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, layout_of, prepared
from ..matmul.generic.epilogues import add_bias
from ..matmul.generic.operands import Bias, Operand
from ..partials import reduce_partials
from ..tiles import add_product, assume_aligned, assume_multiple, batch_and_tile, only_before, product
from ..tuning import TileConfig
from . import sm90
from .blocks import load, store, up_gradient
from .operands import Operands, dense_strides


@triton.jit(do_not_specialize=["M", "dropout"])
def _data_gradient_kernel(
    x_ptr, dy_ptr, up_ptr, gate_ptr, down_ptr, dx_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, dy_sums_ptr,
    strides, N, M, dropout, CONFIG: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    tl.static_assert(dy_sums_ptr is None, "only the sm90 kernel sums dy")
    K: tl.constexpr = CONFIG.k
    O: tl.constexpr = CONFIG.o
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    BLOCK_O: tl.constexpr = CONFIG.block_o
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    GATED: tl.constexpr = gate_ptr is not None
    N = assume_multiple(N, CONFIG.unit)
    x = Operand(x_ptr, *assume_aligned(strides.x, False, CONFIG.unit), rows=M, inner=K)
    up = Operand(up_ptr, *assume_aligned(strides.up, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    gate = Operand(gate_ptr, *assume_aligned(strides.gate, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    down = Operand(down_ptr, *assume_aligned(strides.down, CONFIG.down_transposed, CONFIG.unit), rows=O, inner=N)
    dy = Operand(dy_ptr, *assume_aligned(strides.rows, False, CONFIG.unit), rows=M, inner=O)
    dx = Operand(dx_ptr, *assume_aligned(strides.results, False, CONFIG.unit), rows=M, inner=K)
    up_bias, gate_bias = Bias(up_bias_ptr, 0, strides.bias[0], N), Bias(gate_bias_ptr, 0, strides.bias[1], N)
    drop_limit, keep_scale = dropout
    zero = keep_scale - keep_scale
    batch, row_start = batch_and_tile(M, BLOCK_M)
    rows = row_start + tl.arange(0, BLOCK_M)
    inner, outer = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_O)
    x_tile, dy_tile = load(x, batch, rows, inner), load(dy, batch, rows, outer)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for n in tl.range(0, N, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        up_tile, down_tile = load(up, batch, cols, inner), load(down, batch, outer, cols)
        z = add_bias(product(x_tile, up_tile.T, INPUT_PRECISION), up_bias, 0, cols)
        d_hidden = product(dy_tile, down_tile, INPUT_PRECISION)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], drop_limit)
            d_hidden = d_hidden * kept * keep_scale
        z_gate = z
        if GATED:
            gate_tile = load(gate, batch, cols, inner)
            z_gate = add_bias(product(x_tile, gate_tile.T, INPUT_PRECISION), gate_bias, 0, cols)
        _, slope, gate_slope = hidden_and_slopes(z, z_gate, GATED, ARITHMETIC)
        dz = only_before(up_gradient(d_hidden, slope, z, GATED, ARITHMETIC), cols, N, CONFIG.even)
        acc = add_product(acc, dz.to(up_tile.dtype), up_tile, zero, INPUT_PRECISION)
        if GATED:
            dz_gate = through_activation(d_hidden, gate_slope, z_gate, ARITHMETIC)
            dz_gate = only_before(dz_gate, cols, N, CONFIG.even)
            acc = add_product(acc, dz_gate.to(gate_tile.dtype), gate_tile, zero, INPUT_PRECISION)
    acc *= activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    store(dx, batch, acc, rows, inner)


def data_gradient(
    operands: Operands, dy: torch.Tensor, tiles: TileConfig, column_sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx, contiguous, of the shape of x, from dy ``[Z, M, O]`` (or ``[M, O]``) of any strides.

    Also the sums of dy over all of its rows, ``[O]``, if ``column_sums`` requests them and the kernel that runs reads
    dy only once; else None.
    """
    name = ("data gradient", column_sums, *layout_of(dy))
    launch, shape, ready = prepared(operands.ready, name, _prepare, operands, dy, tiles, column_sums)
    x = operands.x
    dx = x.new_empty(x.shape)
    partials = None if shape is None else x.new_empty(shape, dtype=torch.float32)
    launch((*operands.tensors(dy, dx), partials))
    if partials is None:
        return dx, None
    sums = x.new_empty(partials.shape[1])
    reduce_partials(partials, [sums], ready=ready)
    return dx, sums


def _prepare(
    operands: Operands, dy: torch.Tensor, tiles: TileConfig, column_sums: bool
) -> tuple[Launch, tuple[int, int] | None, dict[Any, Any]]:
    """The launch, the shape of the partial sums of dy, if any, and the cache of their reduction's launch."""
    if tiles.sm90 is not None and (matrices := operands.matrices(dy)) is not None:
        return *sm90.prepare_data_gradient(operands, matrices, column_sums, tiles.sm90), {}
    batch, rows, _, hidden, _ = operands.sizes()
    programs, even = batch * ceil_div(rows, tiles.block_m), hidden % tiles.block_n == 0
    results = dense_strides(operands.x.shape)
    return operands.launch(_data_gradient_kernel, programs, tiles, even, dy, results), None, {}
