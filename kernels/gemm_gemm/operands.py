"""The tensors and the arithmetic of a call, and the kernel arguments that follow from them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..dropout import limit_and_scale
from ..hopper import Matrix, matrix
from ..launching import Launch, lines, unit_to_tell
from ..matmul.arithmetic import Constants
from ..matmul.generic.operands import strides
from ..tuning import TileConfig, padded_widths


@dataclass(frozen=True)
class Arithmetic:
    """Everything but the tensors that the result depends on.

    ``input_precision`` goes to every ``tl.dot``; ``accuracy`` is one of ``activations.ACCURACIES``.
    """

    activation: str
    dropout_p: float
    input_precision: str
    accuracy: str

    @property
    def constants(self) -> Constants:
        """What kernels are compiled for."""
        return Constants(self.activation, self.accuracy, self.input_precision)

    @property
    def sm90_constants(self) -> Constants:
        """The same for the sm90 kernels, whose products of narrow operands have a single input precision."""
        return Constants(self.activation, self.accuracy)

    def dropout(self) -> tuple[int, float]:
        """(limit, scale): see ``dropout.limit_and_scale``."""
        return limit_and_scale(self.dropout_p)


class Strides(NamedTuple):
    """The strides of a kernel's operands; ``rows`` is dy or a residual, ``bias`` has one stride for each bias."""

    x: tuple[int, ...]
    up: tuple[int, ...]
    gate: tuple[int, ...]
    down: tuple[int, ...]
    bias: tuple[int, ...]
    rows: tuple[int, ...]
    results: tuple[int, ...]


class Config(NamedTuple):
    """What a generic kernel is compiled for: its tiles, the widths, as they are and on chip, and layouts.

    ``even``: the axis that the kernel loops over is a whole number of tiles. ``unit`` is the alignment hint of all
    operands: see ``tiles.assume_multiple``.
    """

    block_m: int
    block_n: int
    k: int
    o: int
    block_k: int
    block_o: int
    even: bool
    up_transposed: bool
    down_transposed: bool
    unit: int


class Matrices(NamedTuple):
    """The operands as TMA sees them: x, up and gate (of equal layout), down; dy or a residual."""

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

    ``ready`` caches what launchers prepare at their first execution, by the name of each launch; None caches nothing.
    It belongs to one prepared call: all executions that share it have operands of the same shapes, strides, dtypes,
    device and 16-byte alignment, the same configuration and the same options. Only addresses and the value of the seed
    differ; which gradients are requested, and the layout of dy, may differ, too. It keeps no tensor alive.
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
        tiles: TileConfig,
        even: bool,
        rows: torch.Tensor | None,
        results: tuple[int, ...],
        *,
        further_biases: tuple[int, ...] = (),
        free_numbers: tuple[int, ...] = (),
    ) -> Launch:
        """The launch of a generic kernel, whose further strides follow those of the operands: see `Strides`, `Config`.

        ``rows`` is dy or a residual; ``results`` and ``further_biases`` are strides.
        """
        _, length, width, hidden, out_width = self.sizes()
        bias = (*strides(self.up_bias, 1), *strides(self.gate_bias, 1), *further_biases)
        x, up, gate, down = [strides(each, 3) for each in (self.x, self.up, self.gate, self.down)]
        widths = width, out_width, *padded_widths(width, out_width)
        config = Config(tiles.block_m, tiles.block_n, *widths, even, *self._layouts(rows))
        return Launch(
            kernel,
            programs,
            (Strides(x, up, gate, down, bias, strides(rows, 3), results), hidden),
            (length, self.arithmetic.dropout(), *free_numbers),
            (config, self.arithmetic.constants),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    def matrices(self, rows: torch.Tensor | None = None) -> Matrices | None:
        """The operands, and dy or a residual, for the sm90 kernels; None if one of them has another layout.

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

    def _layouts(self, rows: torch.Tensor | None) -> tuple[bool, bool, int]:
        """Whether up and down are transposed in memory, and the alignment hint.

        The hint is 1 if Triton derives it itself, if gate is not transposed as up is, and if x or ``rows`` is.
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
    """x, dy or a residual ``[Z, M, *]`` as one matrix of rows, with no gap between batch entries; None otherwise."""
    found = matrix(tensor)
    apart = tensor.dim() == 2 or tensor.shape[0] == 1 or (found is not None and found.step == tensor.shape[-2])
    return found if found is not None and apart and not found.transposed else None


def unit_stride(vector: torch.Tensor | None) -> bool:
    """Whether the sm90 kernels can read this bias."""
    return vector is None or vector.stride(0) == 1 or vector.numel() == 1


def dense_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Batch, row and column stride of a contiguous result of this shape; a missing batch axis has stride 0."""
    return (shape[-2] * shape[-1] if len(shape) == 3 else 0, shape[-1], 1)
