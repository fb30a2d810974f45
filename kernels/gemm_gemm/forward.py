"""Forward: y, one pass over x, the hidden alive one tile at a time."""

import torch

from ..activations import activation_unit, hidden_and_slopes
from ..device import tl, triton
from ..dropout import keep
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.epilogues import add_bias
from ..matmul.generic.operands import Bias, Operand, strides
from ..tiles import add_product, assume_aligned, assume_multiple, batch_and_tile, only_before, product
from ..tuning import TileConfig
from . import sm90
from .blocks import load, load_transposed, store
from .operands import Operands, dense_strides, unit_stride


@triton.jit(do_not_specialize=["M", "dropout"])
def _forward_kernel(
    x_ptr, up_ptr, gate_ptr, down_ptr, y_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, down_bias_ptr, residual_ptr,
    strides, N, M, dropout, CONFIG: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
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
    residual = Operand(residual_ptr, *assume_aligned(strides.rows, False, CONFIG.unit), rows=M, inner=O)
    y = Operand(y_ptr, *assume_aligned(strides.results, False, CONFIG.unit), rows=M, inner=O)
    up_bias, gate_bias = Bias(up_bias_ptr, 0, strides.bias[0], N), Bias(gate_bias_ptr, 0, strides.bias[1], N)
    drop_limit, keep_scale = dropout
    zero = keep_scale - keep_scale
    batch, row_start = batch_and_tile(M, BLOCK_M)
    rows = row_start + tl.arange(0, BLOCK_M)
    inner, outer = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_O)
    x_tile = load(x, batch, rows, inner)
    acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for n in tl.range(0, N, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        z = add_bias(product(x_tile, load_transposed(up, batch, inner, cols), INPUT_PRECISION), up_bias, 0, cols)
        z_gate = z
        if GATED:
            z_gate = product(x_tile, load_transposed(gate, batch, inner, cols), INPUT_PRECISION)
            z_gate = add_bias(z_gate, gate_bias, 0, cols)
        hidden, _, _ = hidden_and_slopes(z, z_gate, GATED, ARITHMETIC)
        if seed_ptr is not None:
            kept = keep(tl.load(seed_ptr), rows.to(tl.int64)[:, None], cols.to(tl.int64)[None, :], drop_limit)
            hidden = hidden * kept * keep_scale
        # Past N the weights load as 0, but an infinite x times 0 is NaN, and act(0) may not be 0.
        hidden = only_before(hidden, cols, N, CONFIG.even)
        down_tile = load_transposed(down, batch, cols, outer)
        acc = add_product(acc, hidden.to(down_tile.dtype), down_tile, zero, INPUT_PRECISION)
    acc *= activation_unit(ARITHMETIC.activation, ARITHMETIC.accuracy)
    acc = add_bias(acc, Bias(down_bias_ptr, 0, strides.bias[2], O), 0, outer)
    if residual_ptr is not None:
        acc += load(residual, batch, rows, outer).to(tl.float32)
    store(y, batch, acc, rows, outer)


def forward(
    operands: Operands, down_bias: torch.Tensor | None, residual: torch.Tensor | None, tiles: TileConfig
) -> torch.Tensor:
    """y ``[Z, M, O]``, contiguous, in the dtype of x; ``[M, O]`` if the operands have no batch."""
    shape, launch = prepared(operands.ready, "forward", _prepare, operands, down_bias, residual, tiles)
    y = operands.x.new_empty(shape)
    launch((*operands.tensors(None, y), down_bias, residual))
    return y


def _prepare(
    operands: Operands, down_bias: torch.Tensor | None, residual: torch.Tensor | None, tiles: TileConfig
) -> tuple[tuple[int, ...], Launch]:
    """The shape of y and the launch, shared by all executions of one prepared call."""
    batch, rows, _, hidden, out_width = operands.sizes()
    shape = (*operands.x.shape[:-1], out_width)
    matrices = None if tiles.sm90 is None or not unit_stride(down_bias) else operands.matrices(residual)
    if tiles.sm90 is not None and matrices is not None:
        return shape, sm90.prepare_forward(operands, matrices, tiles.sm90)
    programs, even = batch * ceil_div(rows, tiles.block_m), hidden % tiles.block_n == 0
    return shape, operands.launch(
        _forward_kernel, programs, tiles, even, residual, dense_strides(shape), further_biases=strides(down_bias, 1)
    )
