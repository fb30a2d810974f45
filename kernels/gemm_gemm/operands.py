"""What a call of these kernels is made of: its tensors, its arithmetic, and the arguments that all kernels share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..dropout import limit_and_scale
from ..hopper import Matrix, matrix
from ..launching import Launch, Numbers, lines, unit_to_tell
from ..matmul.generic.operands import strides
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
    """The operands of a call as matrices to copy: x, up and gate (alike in their layout), down; dy or a residual."""

    x: Matrix
    up: Matrix
    gate: Matrix | None
    down: Matrix
    beside: Matrix | None = None


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

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Z, M, K, N, O."""
        batch = self.x.shape[0] if self.x.dim() == 3 else 1
        return batch, self.x.shape[-2], self.x.shape[-1], self.up.shape[-2], self.down.shape[-2]

    def tensors(self, dy: torch.Tensor | None, *results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The operands, with dy if there is one, and results, in the order of all kernels' signatures."""
        rows = (self.x,) if dy is None else (self.x, dy)
        return (*rows, self.up, self.gate, self.down, *results, self.up_bias, self.gate_bias, self.seed)

    def launch(
        self,
        kernel: Any,
        programs: int,
        numbers: Numbers,
        tiles: TileConfig,
        even: bool,
        rows: torch.Tensor | None,
        *free_numbers: int,
    ) -> Launch:
        """The launch of a generic kernel: its own ``numbers`` are told behind the strides of the operands.

        ``even`` says that the axis the kernel loops over is a whole number of tiles, ``rows`` is what the kernel reads
        beside the operands, dy or a residual.
        """
        width, out_width = self.x.shape[-1], self.down.shape[-2]
        how = self.arithmetic
        return Launch(
            kernel,
            programs,
            (
                *[strides(each, 3) for each in (self.x, self.up, self.gate, self.down)],
                (*strides(self.up_bias, 1), *strides(self.gate_bias, 1)), *numbers,
            ),
            (self.x.shape[-2], how.dropout(), *free_numbers),
            (
                tiles.block_m, tiles.block_n, (width, out_width, *padded_widths(width, out_width)), even,
                how.activation, how.accuracy, how.input_precision, self._units(rows),
            ),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    def matrices(self, rows: torch.Tensor | None = None) -> Matrices | None:
        """The operands, and dy or a residual, for the sm90 kernels; None where one does not lie as they need it.

        The generic kernels take any strides.
        """
        if self.seed is not None or not unit_stride(self.up_bias) or not unit_stride(self.gate_bias):
            return None
        x, up, down = rows_of(self.x), matrix(self.up), matrix(self.down)
        gate, beside = None if self.gate is None else matrix(self.gate), None if rows is None else rows_of(rows)
        if x is None or up is None or down is None or (rows is not None and beside is None):
            return None
        if self.gate is not None and (gate is None or (gate.transposed, gate.step) != (up.transposed, up.step)):
            return None
        return Matrices(x, up, gate, down, beside)

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


def dense_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Batch, row and column stride of a contiguous result of this shape; a missing batch axis has stride 0."""
    return (shape[-2] * shape[-1] if len(shape) == 3 else 0, shape[-1], 1)
