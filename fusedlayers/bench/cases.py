"""What can be benchmarked: each case is one operation of the library, with its letters, its grids, inputs and costs.

A new operation is one more ``Case`` in ``CASES``. Everything else in this package works on any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional, reference
from ..functional.dispatch import ffn_problem, gemm_gemm_problem
from ..planning import Problem

Shape = tuple[int, ...]
Inputs = Mapping[str, Tensor]
INITS = ("normal", "uniform", "integer", "zeros")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """What is benchmarked of a case, beside its shape; a case without gates, biases or recompute ignores these."""

    activation: str = "identity"
    gated: bool = False
    bias: bool = False
    recompute: bool | str = "auto"


@dataclass(frozen=True)
class Operand:
    """One input: its shape, and its standard deviation (of weights: one over the root of their fan-in)."""

    shape: Shape
    scale: float = 1.0


@dataclass(frozen=True)
class Grid:
    """A published table: its name (of a plot), its title, the options of all its rows, and the shapes."""

    name: str
    title: str
    options: Options
    shapes: tuple[Shape, ...]
    shapes_without_gpu: tuple[Shape, ...]


@dataclass(frozen=True)
class Case:
    """One operation.

    ``ours`` and ``torch_expression`` take the inputs of ``operands`` by name and then ``our_keywords`` or
    ``torch_keywords`` of the options. ``forward_flops`` counts the products of the forward pass; each product has two
    of the same size in the backward pass. ``parameters`` are the inputs that a module would own.
    """

    name: str
    letters: tuple[str, ...]
    meaning: str
    parameters: frozenset[str]
    flags: frozenset[str]
    grids: tuple[Grid, ...]
    operands: Callable[[Shape, Options], dict[str, Operand]]
    forward_flops: Callable[[Shape, Options], int]
    ours: Callable[..., Tensor]
    torch_expression: Callable[..., Tensor]
    problem: Callable[[Inputs, Options], Problem]
    our_keywords: Callable[[Options], dict[str, object]]
    torch_keywords: Callable[[Options], dict[str, object]]

    def grid(self, gated: bool) -> Grid:
        """The published grid with or without a gate."""
        return next(grid for grid in self.grids if grid.options.gated == gated)

    def flops(self, shape: Shape, options: Options, backward: bool) -> int:
        """Floating-point operations of the forward pass, or of forward and backward, nothing computed twice."""
        return self.forward_flops(shape, options) * (3 if backward else 1)

    def result_shape(self, shape: Shape, options: Options) -> Shape:
        """The shape of y, from torch's rules, without computing anything."""
        operands = self.operands(shape, options)
        blank = {name: torch.empty(operand.shape, device="meta") for name, operand in operands.items()}
        return tuple(self.torch_expression(**blank, **self.torch_keywords(options)).shape)

    def moved_bytes(self, shape: Shape, options: Options, dtype: torch.dtype, backward: bool) -> int:
        """Each input read and the result written once; backward reads inputs and upstream again, writes gradients."""
        inputs = sum(math.prod(operand.shape) for operand in self.operands(shape, options).values())
        output = math.prod(self.result_shape(shape, options))
        return dtype.itemsize * (inputs + output + (2 * inputs + output if backward else 0))

    def inputs(
        self, shape: Shape, options: Options, *, init: str, dtype: torch.dtype, device: torch.device, seed: int,
        density: float = 1.0,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Fresh random inputs by name. ``density``: the share of non-zero values of ``init="integer"``."""
        generator = torch.Generator(device).manual_seed(seed)
        return {
            name: draw(operand, init, dtype, device, generator, density)
            for name, operand in self.operands(shape, options).items()
        }


def draw(
    operand: Operand,
    init: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    density: float = 1.0,
) -> Tensor:
    """A tensor of ``operand``'s shape: N(0, scale²), uniform with that deviation, zeros, or integers in -2 … 2."""
    if init == "zeros":
        return torch.zeros(operand.shape, dtype=dtype, device=device)
    if init == "integer":
        values = torch.randint(1, 3, operand.shape, generator=generator, device=device, dtype=torch.int8)
        chance = torch.rand(operand.shape, generator=generator, device=device)
        # One draw decides both: below half the density the value is negative, above the density it is zero.
        signs = (chance < density).to(torch.int8) - 2 * (chance < density / 2).to(torch.int8)
        return (values * signs).to(dtype)
    if init == "uniform":
        values = torch.rand(operand.shape, generator=generator, device=device) * 2 - 1
        return (values * (operand.scale * math.sqrt(3))).to(dtype)
    return (torch.randn(operand.shape, generator=generator, device=device) * operand.scale).to(dtype)


def _ffn_operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, width, hidden = shape
    first, second = width**-0.5, hidden**-0.5
    operands = {
        "x": Operand((rows, width)),
        "w_up": Operand((hidden, width), first),
        "w_down": Operand((width, hidden), second),
    }
    if options.bias:
        operands |= {"b_up": Operand((hidden,)), "b_down": Operand((width,))}
    if options.gated:
        operands["w_gate"] = Operand((hidden, width), first)
        operands |= {"b_gate": Operand((hidden,))} if options.bias else {}
    return operands


def _ffn_flops(shape: Shape, options: Options) -> int:
    return 2 * math.prod(shape) * (3 if options.gated else 2)


def _ffn_problem(inputs: Inputs, options: Options) -> Problem:
    return ffn_problem(**inputs, activation=options.activation, dropout_p=0.0, recompute=options.recompute)


def _gemm_gemm_operands(shape: Shape, options: Options) -> dict[str, Operand]:
    batch, rows, hidden, width, columns = shape
    return {
        "a": Operand((batch, rows, width)),
        "b": Operand((batch, width, hidden), width**-0.5),
        "c": Operand((batch, hidden, columns), hidden**-0.5),
    }


def _gemm_gemm_flops(shape: Shape, options: Options) -> int:
    batch, rows, hidden, width, columns = shape
    return 2 * batch * rows * hidden * (width + columns)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="gemm_gemm",
            letters=("B", "M", "N", "K", "O"),
            meaning="batch × rows × hidden × inner × output columns",
            parameters=frozenset(),
            flags=frozenset(),
            grids=(
                Grid(
                    name="gemm_gemm",
                    title="Batched GEMM-GEMM, no activation",
                    options=Options("identity"),
                    shapes=(
                        (4, 1024, 1024, 64, 128),
                        (64, 1024, 1024, 64, 64),
                        (64, 1024, 1024, 128, 128),
                        (16, 4096, 4096, 128, 128),
                        (512, 256, 256, 64, 64),
                    ),
                    shapes_without_gpu=((4, 128, 256, 32, 64), (2, 130, 70, 24, 24)),
                ),
                Grid(
                    name="gemm_gemm_gelu_tanh",
                    title="Batched GEMM-GEMM, gelu_tanh",
                    options=Options("gelu_tanh"),
                    shapes=((64, 1024, 1024, 64, 64), (64, 1024, 1024, 128, 128)),
                    shapes_without_gpu=((2, 130, 70, 24, 24),),
                ),
            ),
            operands=_gemm_gemm_operands,
            forward_flops=_gemm_gemm_flops,
            ours=functional.gemm_gemm,
            torch_expression=reference.gemm_gemm,
            problem=lambda inputs, options: gemm_gemm_problem(**inputs, activation=options.activation),
            our_keywords=lambda options: {"activation": options.activation},
            torch_keywords=lambda options: {"activation": options.activation},
        ),
        Case(
            name="ffn",
            letters=("M", "K", "N"),
            meaning="tokens × d_model × d_ff",
            parameters=frozenset({"w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate"}),
            flags=frozenset({"gated", "bias", "recompute"}),
            grids=(
                Grid(
                    name="ffn",
                    title="FFN, gelu_tanh, bias",
                    options=Options("gelu_tanh", bias=True),
                    shapes=(
                        (131072, 64, 256),
                        (131072, 128, 512),
                        (65536, 256, 1024),
                        (32768, 512, 2048),
                        (16384, 768, 3072),
                        (16384, 1024, 4096),
                        (8192, 2048, 8192),
                        (8192, 4096, 14336),
                    ),
                    shapes_without_gpu=((1024, 64, 256), (130, 48, 100)),
                ),
                Grid(
                    name="ffn_gelu",
                    title="FFN, gelu (erf), bias",
                    options=Options("gelu", bias=True),
                    shapes=((131072, 128, 512),),
                    shapes_without_gpu=((130, 48, 100),),
                ),
                Grid(
                    name="gated_ffn",
                    title="Gated FFN, silu, no bias",
                    options=Options("silu", gated=True),
                    shapes=(
                        (65536, 256, 768),
                        (32768, 512, 1408),
                        (16384, 1024, 2816),
                        (8192, 2048, 5632),
                        (8192, 4096, 14336),
                    ),
                    shapes_without_gpu=((1024, 64, 192), (130, 48, 100)),
                ),
            ),
            operands=_ffn_operands,
            forward_flops=_ffn_flops,
            ours=functional.ffn,
            torch_expression=reference.ffn,
            problem=_ffn_problem,
            our_keywords=lambda options: {"activation": options.activation, "recompute": options.recompute},
            torch_keywords=lambda options: {"activation": options.activation},
        ),
    )
}
