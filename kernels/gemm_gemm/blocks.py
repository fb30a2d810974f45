"""What the generic kernels share: tiles of their operands, and gradients of the hidden."""

from ..activations import through_activation
from ..device import tl, triton
from ..tiles import load_tile, store_tile


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
