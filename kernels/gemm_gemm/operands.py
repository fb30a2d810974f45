"""What a call of these kernels is made of: its tensors, its arithmetic, and the arguments that all kernels share."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..dropout import limit_and_scale
from ..hopper import Matrix, matrix
from ..launching import lines, unit_to_tell
from ..tuning import TileConfig, padded_widths


@dataclass(frozen=True)
class Arithmetic:
    """What is computed, besides the tensors: names and numbers that the kernels of one call share.

    ``input_precision`` goes to every ``tl.dot``; ``accuracy`` is one of ``activations.ACCURACIES``.
    """

    activation: str
    dropout_p: float
    input_precision: str
    accuracy: str

    def dropout(self) -> tuple[int, float]:
        """The limit of what is dropped, and the factor of what is kept."""
        return limit_and_scale(self.dropout_p)


class Matrices(NamedTuple):
    """The operands of a call as matrices to copy: x, up and gate (alike in their layout), down."""

    x: Matrix
    up: Matrix
    gate: Matrix | None
    down: Matrix


# Not frozen: to set the fields of a frozen one takes three times as long, in every call.
@dataclass(slots=True, eq=False)
class Operands:
    """The tensors of one call, checked: x ``[Z, M, K]``, up and gate ``[Z, N, K]``, down ``[Z, O, N]``.

    Without a batch, all of them lack the axis ``Z``. A batch stride of 0 shares a matrix.

    ``ready`` keeps what the launchers prepare at their first execution for later ones, by the name of each launch;
    None keeps nothing. It belongs to one prepared call: all executions that share it have operands of the same shapes,
    strides, dtypes, device and 16-byte alignment, the same configuration and the same options. Only addresses differ,
    and the value of the seed; which gradients are wanted and how dy lies may differ, too. It keeps no tensor alive.
    """

    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    seed: torch.Tensor | None
    arithmetic: Arithmetic
    ready: dict[Any, Any] | None = None
    _found: "tuple[Matrices | None] | None" = field(default=None, init=False, repr=False)

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Z, M, K, N, O."""
        batch = self.x.shape[0] if self.x.dim() == 3 else 1
        return batch, self.x.shape[-2], self.x.shape[-1], self.up.shape[-2], self.down.shape[-2]

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """The operands, in the order of the kernels' signatures."""
        return self.x, self.up, self.gate, self.down, self.up_bias, self.gate_bias, self.seed

    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Strides of x, up, gate and down, and those of both biases, in the order of the kernels' signatures."""
        matrices = (strides(self.x), strides(self.up), strides(self.gate), strides(self.down))
        return (*matrices, (stride(self.up_bias), stride(self.gate_bias)))

    @property
    def matrices(self) -> Matrices | None:
        """The operands for the sm90 kernels, or None where one does not lie as their copies need it.

        The generic kernels take any strides.
        """
        if self._found is None:
            self._found = (self._matrices(),)
        return self._found[0]

    def _matrices(self) -> Matrices | None:
        if self.seed is not None or not unit_stride(self.up_bias) or not unit_stride(self.gate_bias):
            return None
        x, up, down = rows_of(self.x), matrix(self.up), matrix(self.down)
        gate = None if self.gate is None else matrix(self.gate)
        if x is None or up is None or down is None:
            return None
        if self.gate is not None and (gate is None or (gate.transposed, gate.step) != (up.transposed, up.step)):
            return None
        return Matrices(x, up, gate, down)

    def constants(self, tiles: TileConfig, even: bool, rows: torch.Tensor | None) -> tuple[object, ...]:
        """The compile-time arguments, in the order of the kernels' signatures.

        ``even`` says that the axis the kernel loops over is a whole number of tiles, ``rows`` is what the kernel reads
        beside the operands, dy or a residual.
        """
        width, out_width = self.x.shape[-1], self.down.shape[-2]
        arithmetic = self.arithmetic
        return (
            tiles.block_m, tiles.block_n, (width, out_width, *padded_widths(width, out_width)), even,
            (arithmetic.activation, arithmetic.accuracy, arithmetic.input_precision), self._units(rows),
        )  # fmt: skip

    def _units(self, rows: torch.Tensor | None) -> tuple[bool, bool, int]:
        """Whether up and down lie transposed, and in units of how many elements all operands lie (``tiles.in_units``).

        1 where Triton knows of itself, where gate does not lie as up does, and where x or ``rows`` lie transposed.
        """
        transposed, of_up = lines(self.up)
        down_transposed, of_down = lines(self.down)
        sizes = [*self.sizes()[2:], *of_up, *of_down]
        for tensor, expected in ((self.x, False), (rows, False), (self.gate, transposed)):
            if tensor is not None:
                found, of_lines = lines(tensor)
                sizes += of_lines if found == expected else (1,)
        return transposed, down_transposed, unit_to_tell(self.x, *sizes)


def rows_of(tensor: torch.Tensor) -> Matrix | None:
    """x, dy or a residual ``[Z, M, *]`` as one matrix of rows, every batch entry behind the one before."""
    found = matrix(tensor)
    apart = tensor.dim() == 2 or tensor.shape[0] == 1 or (found is not None and found.step == tensor.shape[-2])
    return found if found is not None and apart and not found.transposed else None


def unit_stride(vector: torch.Tensor | None) -> bool:
    """Whether the sm90 kernels can read this bias."""
    return vector is None or vector.stride(0) == 1 or vector.numel() == 1


def stride(vector: torch.Tensor | None) -> int:
    """The stride of a bias; 0 where there is none."""
    return 0 if vector is None else vector.stride(0)


def strides(matrix: torch.Tensor | None) -> tuple[int, ...]:
    """Batch, row and column stride; a missing batch axis has stride 0, a missing matrix only zeros."""
    if matrix is None:
        return (0, 0, 0)
    return matrix.stride() if matrix.dim() == 3 else (0, *matrix.stride())


def dense_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The same of a result of this shape, which is contiguous."""
    return (shape[-2] * shape[-1] if len(shape) == 3 else 0, shape[-1], 1)
