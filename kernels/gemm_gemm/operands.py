"""What a call of these kernels is made of: its tensors, its arithmetic, and the arguments that all kernels share."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..activations import activate
from ..device import tl, triton
from ..tuning import TileConfig, padded_width


@triton.jit
def hidden_and_slopes(z, z_gate, GATED: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """(H, ∂H/∂Z, ∂H/∂Zg) from the pre-activations; without a gate the last two are the same slope."""
    if GATED:
        value, slope = activate(z_gate, ACTIVATION, FAST)
        return value * z, value, z * slope
    else:
        value, slope = activate(z, ACTIVATION, FAST)
        return value, slope, slope


@dataclass(frozen=True)
class Arithmetic:
    """What is computed, besides the tensors: names and numbers that the kernels of one call share.

    ``input_precision`` goes to every ``tl.dot``; ``fast`` asks for the hardware tanh of ``activations.py``.
    """

    activation: str
    dropout_p: float
    input_precision: str
    fast: bool


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, checked and shaped ``[Z, ...]`` (a batch stride of 0 shares a weight)."""

    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    seed: torch.Tensor | None
    arithmetic: Arithmetic

    def strides(self) -> tuple[int, ...]:
        """Strides of x, up, gate, down, in the order of the kernels' signatures; zeros where there is no gate."""
        gate_strides = (0, 0, 0) if self.gate is None else self.gate.stride()
        return (*self.x.stride(), *self.up.stride(), *gate_strides, *self.down.stride())

    def constants(self, tiles: TileConfig) -> dict[str, object]:
        """The compile-time arguments that all three kernels share."""
        width, out_width = self.x.shape[2], self.down.shape[1]
        return {
            "K": width,
            "O": out_width,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": padded_width(width),
            "BLOCK_O": padded_width(out_width),
            "ACTIVATION": self.arithmetic.activation,
            "FAST": self.arithmetic.fast,
            "INPUT_PRECISION": self.arithmetic.input_precision,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def stride(vector: torch.Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
