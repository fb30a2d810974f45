"""What the generic kernels share: their operands, tiles of these, and gradients of the hidden."""

from typing import Any

from ..activations import through_activation
from ..device import tl, triton
from ..matmul.generic import operands
from ..tiles import assume_aligned, load_tile, store_tile

# Type checkers cannot tell how many strides a device function returns.
Operand: Any = operands.Operand


@triton.jit
def rows_operand(ptr, strides, rows, COLUMNS: tl.constexpr, CONFIG: tl.constexpr):
    """x, dy, a residual or a result ``[rows, COLUMNS]``, with the alignment hint of ``operands.Config``."""
    return Operand(ptr, *assume_aligned(strides, False, CONFIG.unit), rows=rows, inner=COLUMNS)


@triton.jit
def weights(up_ptr, gate_ptr, down_ptr, strides, N, CONFIG: tl.constexpr):
    """(up, gate, down), likewise."""
    K: tl.constexpr = CONFIG.k
    O: tl.constexpr = CONFIG.o
    up = Operand(up_ptr, *assume_aligned(strides.up, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    gate = Operand(gate_ptr, *assume_aligned(strides.gate, CONFIG.up_transposed, CONFIG.unit), rows=N, inner=K)
    down = Operand(down_ptr, *assume_aligned(strides.down, CONFIG.down_transposed, CONFIG.unit), rows=O, inner=N)
    return up, gate, down


@triton.jit
def load(operand, batch, rows, inner):
    """The tile ``[rows, inner]`` of an entry of an ``Operand``."""
    return load_tile(
        operand.ptr + batch * operand.stride_batch, rows, inner, operand.stride_row, operand.stride_inner,
        operand.rows, operand.inner,
    )  # fmt: skip


@triton.jit
def load_transposed(operand, batch, inner, rows):
    """The same tile as ``[inner, rows]``."""
    return load_tile(
        operand.ptr + batch * operand.stride_batch, inner, rows, operand.stride_inner, operand.stride_row,
        operand.inner, operand.rows,
    )  # fmt: skip


@triton.jit
def store(operand, batch, values, rows, inner):
    """Rounds the tile ``[rows, inner]`` of an entry once, and stores it."""
    store_tile(
        operand.ptr + batch * operand.stride_batch, values, rows, inner, operand.stride_row, operand.stride_inner,
        operand.rows, operand.inner,
    )  # fmt: skip


@triton.jit
def up_gradient(d_hidden, slope, z, GATED: tl.constexpr, ARITHMETIC: tl.constexpr):
    """dZ from dH. With a gate, z is a mere factor of the hidden: its slope is the activation of the gate."""
    if GATED:
        return d_hidden * slope
    else:
        return through_activation(d_hidden, slope, z, ARITHMETIC)
