"""Whether the tensors of a call are laid out as the copy engine takes them, and how it sees them."""

from typing import NamedTuple

import torch

from ...hopper import Matrix, matrix
from ..operands import Operands


class Matrices(NamedTuple):
    """The operands of a call as matrices to copy: x, up and gate (alike in their layout), down."""

    x: Matrix
    up: Matrix
    gate: Matrix | None
    down: Matrix


def matrices_of(operands: Operands) -> Matrices | None:
    """The matrices, or None where a tensor does not lie as they must: the portable kernels take any strides."""
    if operands.seed is not None or not _unit_stride(operands.up_bias) or not _unit_stride(operands.gate_bias):
        return None
    x, up, down = rows_of(operands.x), matrix(operands.up), matrix(operands.down)
    gate = None if operands.gate is None else matrix(operands.gate)
    if x is None or up is None or down is None:
        return None
    if operands.gate is not None and (gate is None or (gate.transposed, gate.step) != (up.transposed, up.step)):
        return None
    return Matrices(x, up, gate, down)


def rows_of(tensor: torch.Tensor) -> Matrix | None:
    """x, dy or a residual ``[Z, M, *]`` as one matrix of rows, every batch entry behind the one before."""
    found = matrix(tensor)
    apart = tensor.dim() == 2 or tensor.shape[0] == 1 or (found is not None and found.step == tensor.shape[-2])
    return found if found is not None and apart and not found.transposed else None


def _unit_stride(vector: torch.Tensor | None) -> bool:
    return vector is None or vector.stride(0) == 1 or vector.numel() == 1
