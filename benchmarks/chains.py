"""Layers as they stand in a model, and loops over them: what each of them costs where it is launched by itself.

An FFN stands in a chain of residual layers, ``x = x + ffn(x)``; linear layers are called one after the other, forward
and, where gradients are wanted, backward. Ours and torch's have the same parameters: torch's are the linear layers of
ours, with an activation module between them, as users write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedlayers import functional
from fusedlayers.bench.cases import Grid, Options, Shape
from fusedlayers.modules import FusedFFN, SplitKLinear

DEPTH = 16
# Who made a layer: torch, our module, or our function without a module around it.
TORCH, MODULE, FUNCTION = "torch", "module", "function"
Layer = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu_tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU}


class GatedFFN(nn.Module):
    """A gated FFN as users write it, of these linear layers."""

    def __init__(self, up: nn.Module, gate: nn.Module, down: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.up_proj, self.gate_proj, self.down_proj, self.activation = up, gate, down, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    """``x = x + layer(x)`` for one layer after the other."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass(frozen=True)
class Stand:
    """How layers of one kind are built, and stand: in a chain, or apart. ``makers`` are those there are of a layer."""

    grid: Grid
    letters: tuple[str, ...]
    meaning: str
    chained: bool
    makers: tuple[str, ...]
    build: Callable[[Shape, Options, Any], dict[str, Layer]]

    def layers(self, shape: Shape, depth: int, **placed: Any) -> dict[str, list[Layer]]:
        """``depth`` layers of each maker, which share their parameters; ``placed`` are device and dtype."""
        built = [self.build(shape, self.grid.options, placed) for _ in range(depth)]
        return {maker: [layers[maker] for layers in built] for maker in self.makers}

    def widths(self, shape: Shape) -> tuple[int, int]:
        """Columns of x and of the result."""
        return (shape[1], shape[1]) if self.chained else (shape[2], shape[1])

    def units(self, layers: Sequence[Layer]) -> list[Layer]:
        """What is called one after the other, with a backward pass of its own: the chain, or each layer."""
        return [Residual(layers)] if self.chained else list(layers)


def _ffn(shape: Shape, options: Options, placed: Any) -> dict[str, Layer]:
    _, width, hidden = shape
    fused = FusedFFN(width, hidden, options.activation, options.gated, options.bias, **placed)
    activation = _ACTIVATIONS[options.activation]()
    if fused.gate_proj is None:
        return {TORCH: nn.Sequential(fused.up_proj, activation, fused.down_proj), MODULE: fused}
    return {TORCH: GatedFFN(fused.up_proj, fused.gate_proj, fused.down_proj, activation), MODULE: fused}


def _linear(shape: Shape, options: Options, placed: Any) -> dict[str, Layer]:
    _, columns, inner = shape
    split = SplitKLinear(inner, columns, **placed)
    plain = nn.Linear(inner, columns, device="meta")
    plain.weight, plain.bias = split.weight, split.bias
    return {TORCH: plain, MODULE: split, FUNCTION: partial(functional.linear, weight=split.weight, bias=split.bias)}


_FFN_LETTERS, _FFN_MEANING = ("M", "K", "N"), "tokens × d_model × d_ff"
STANDS: dict[str, Stand] = {
    stand.grid.name: stand
    for stand in (
        Stand(
            Grid(
                "ffn",
                "Residual FFN, gelu_tanh, bias",
                Options("gelu_tanh", bias=True),
                (
                    (64, 256, 1024), (64, 1024, 4096), (16384, 128, 512), (16384, 256, 1024), (16384, 512, 2048),
                    (8192, 768, 3072),
                ),
                ((64, 32, 48),),
            ),
            _FFN_LETTERS, _FFN_MEANING, True, (TORCH, MODULE), _ffn,
        ),
        Stand(
            Grid(
                "gated_ffn",
                "Residual gated FFN, silu, no bias",
                Options("silu", gated=True),
                ((64, 1024, 2816), (8192, 1024, 2816)),
                ((64, 32, 48),),
            ),
            _FFN_LETTERS, _FFN_MEANING, True, (TORCH, MODULE), _ffn,
        ),
        Stand(
            Grid(
                "linear",
                "Linear, bias",
                Options(bias=True),
                ((65536, 256, 1024), (4096, 1024, 1024), (8, 2048, 8192)),
                ((8, 16, 64),),
            ),
            ("M", "N", "K"), "rows × output columns × input columns", False, (TORCH, MODULE, FUNCTION), _linear,
        ),
    )
}  # fmt: skip


class Loop:
    """One loop over ``depth`` layers: with gradients of x and all parameters, or without any.

    It is the work of the clock: ``call`` is a loop that :meth:`over` made.
    """

    def __init__(
        self, x: Tensor, upstream: Tensor, parameters: Sequence[nn.Parameter], depth: int, backward: bool
    ) -> None:
        self.x, self.upstream = x, upstream
        self.leaves = (x, *parameters)
        self.count, self.backward = depth, backward

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.upstream.device

    def over(self, units: Sequence[Layer], threads: bool = True) -> Callable[[], None]:
        """The loop over these units; without ``threads`` autograd runs its nodes in the thread that calls it."""
        if threads:
            return partial(self._run, units)

        def run() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                self._run(units)

        return run

    def run_all(self, call: Callable[[], None]) -> None:
        """The loop, once."""
        call()

    def _run(self, units: Sequence[Layer]) -> None:
        x, upstream = self.x, self.upstream
        if not self.backward:
            with torch.no_grad():
                for unit in units:
                    unit(x)
            return
        self.forget()
        for unit in units:
            x.grad = None
            unit(x).backward(upstream)

    def forget(self) -> None:
        """Drop all gradients, as an optimizer does between steps."""
        for leaf in self.leaves:
            leaf.grad = None
