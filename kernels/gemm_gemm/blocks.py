"""What the generic kernels share: tiles of operands whose lines are whole vectors, and gradients of the hidden."""

from typing import Any

from ..activations import through_activation
from ..device import tl, triton
from ..matmul.generic import operands
from ..tiles import load_tile, store_tile

# Type checkers cannot tell how many strides a device function returns.
Operand: Any = operands.Operand


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
def up_gradient(d_hidden, slope, z, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """dZ from dH. With a gate, z is but a factor of the hidden: its slope is the activation of the gate."""
    if GATED:
        return d_hidden * slope
    else:
        return through_activation(d_hidden, slope, z, ACTIVATION)
