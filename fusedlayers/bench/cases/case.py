"""A benchmark case: one operation of the library, with its letters, its grids, inputs and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...functional.operation import OPERATIONS
from ...planning import Call, Device

if TYPE_CHECKING:
    from .trial import Trial

Shape = tuple[int, ...]
Inputs = Mapping[str, Tensor]
Results = Tensor | tuple[Tensor | None, ...]
INITS = ("normal", "uniform", "integer", "zeros")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Every case by its name, in the order of ``place``: the package fills it with the CASE of each of its files.
ALL: dict[str, Case] = {}


@dataclass(frozen=True)
class Options:
    """What is benchmarked of a case, beside its shape; a case ignores options that are not among its flags."""

    activation: str = "identity"
    gated: bool = False
    bias: bool = False
    recompute: bool | str = "auto"
    dropout_p: float = 0.0  # with one mask, that of a fixed seed
    op: str = "sum"
    dim: int = -2
    skewed: bool = False  # whether some experts have far more tokens than others


@dataclass(frozen=True)
class Operand:
    """One input: its shape, and its standard deviation (of weights: one over the root of their fan-in).

    With ``classes`` it holds integers below that number, and has no gradient; nor has it one where it is ``frozen``.
    Classes are equally likely or, ``skewed``, follow Zipf's law: the n-th is 1/n times as likely as the first.
    """

    shape: Shape
    scale: float = 1.0
    classes: int = 0
    frozen: bool = False
    skewed: bool = False

    def blank(self, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        """A tensor like it that holds no numbers, on the meta device."""
        if self.classes:
            return torch.empty(self.shape, dtype=torch.int64, device="meta")
        return torch.empty(self.shape, dtype=dtype, device="meta", requires_grad=requires_grad and not self.frozen)


@dataclass(frozen=True)
class Draw:
    """How tensors are drawn: ``init`` is one of INITS, and ``density`` the share of non-zero integers."""

    dtype: torch.dtype
    device: torch.device
    init: str = "normal"
    seed: int = 0
    density: float = 1.0

    def another(self, number: int) -> Draw:
        """The same with another seed, ``number`` further."""
        return replace(self, seed=self.seed + number)

    def generator(self) -> torch.Generator:
        """A generator with the seed, for all tensors of a call."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def tensor(self, operand: Operand, generator: torch.Generator) -> Tensor:
        """A tensor of ``operand``: N(0, scale²), uniform with that deviation, zeros, or integers in -2 … 2."""
        device = self.device
        if operand.skewed:
            likely = 1 / torch.arange(1, operand.classes + 1, device=device)
            drawn = likely.multinomial(math.prod(operand.shape), replacement=True, generator=generator)
            return drawn.view(operand.shape)
        if operand.classes:
            return torch.randint(operand.classes, operand.shape, generator=generator, device=device)
        if self.init == "zeros":
            return torch.zeros(operand.shape, dtype=self.dtype, device=device)
        if self.init == "integer":
            values = torch.randint(1, 3, operand.shape, generator=generator, device=device, dtype=torch.int8)
            chance = torch.rand(operand.shape, generator=generator, device=device)
            # One draw decides both: below half the density the value is negative, above the density it is zero.
            signs = (chance < self.density).to(torch.int8) - 2 * (chance < self.density / 2).to(torch.int8)
            return (values * signs).to(self.dtype)
        if self.init == "uniform":
            values = torch.rand(operand.shape, generator=generator, device=device) * 2 - 1
            return (values * (operand.scale * math.sqrt(3))).to(self.dtype)
        return (torch.randn(operand.shape, generator=generator, device=device) * operand.scale).to(self.dtype)


@dataclass(frozen=True)
class Grid:
    """A published table: its name (of a plot), its title, the options of all its rows, and the shapes."""

    name: str
    title: str
    options: Options
    shapes: tuple[Shape, ...]
    shapes_without_gpu: tuple[Shape, ...]


def as_tuple(results: Results) -> tuple[Tensor, ...]:
    """What an operation returned, without what is None."""
    together = (results,) if isinstance(results, Tensor) else results
    return tuple(tensor for tensor in together if tensor is not None)


def shape_text(shape: Iterable[int]) -> str:
    """``65536×256×1024``."""
    return "×".join(map(str, shape))


def one_product(shape: Shape, options: Options) -> int:
    """Floating-point operations of a single product with these three sizes."""
    return 2 * math.prod(shape)


def activation_keyword(options: Options) -> dict[str, object]:
    """The keywords of a function that takes an activation, and no other option of a case."""
    return {"activation": options.activation}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation.

    ``operation`` names the public function that plans it. ``ours`` and ``torch_expression`` take the inputs of
    ``operands`` by name, then ``keywords`` of the options. ``results`` names what they return, a tensor or a tuple, the
    last of which may be None; ``result_dtype`` is theirs if it is not that of the inputs.

    ``forward_flops`` counts the products of the forward pass. ``backward_flops`` counts those of the backward pass,
    which by default has two products for each of the forward pass. ``parameters`` are the inputs that a module owns.

    For verification: ``yardstick`` is torch's expression in less memory; ``draws`` of inputs are judged together; and
    ``independent`` counts the results that make up the gradient of a parameter, whose tiles have more elements.

    Without ``backward`` only the forward pass is benchmarked. ``rotating`` work takes a few microseconds, and is timed
    over many inputs in a row. A case without ``grids`` is run by the self-test alone. ``trials`` are those of the
    self-test on a GPU, at least one for every tile configuration that the planner can choose there, and ``few_trials``
    those for Triton's interpreter. ``place`` orders the cases in commands and tables.
    """

    name: str
    operation: str
    place: int
    letters: tuple[str, ...]
    meaning: str
    grids: tuple[Grid, ...] = ()
    flags: frozenset[str] = frozenset()
    has_activation: bool = True
    operands: Callable[[Shape, Options], dict[str, Operand]]
    parameters: frozenset[str] = frozenset()
    keywords: Callable[[Options], dict[str, object]] = activation_keyword
    ours: Callable[..., Results]
    torch_expression: Callable[..., Results]
    results: tuple[str, ...] = ("y",)
    result_dtype: torch.dtype | None = None
    backward: bool = True
    forward_flops: Callable[[Shape, Options], int] = one_product
    backward_flops: Callable[[Shape, Options], int] | None = None
    rotating: bool = False
    yardstick: Callable[..., Results] | None = None
    draws: int = 1
    independent: Callable[[Shape, Options], int] | None = None
    trials: Callable[[Device], Iterable[Trial]]
    few_trials: tuple[Trial, ...]

    def our_keywords(self, options: Options) -> dict[str, object]:
        """The keywords of ``ours``."""
        recomputes = options.recompute is True and "recompute" in self.flags
        return self.keywords(options) | ({"recompute": True} if recomputes else {})

    def problem(self, inputs: Inputs, options: Options) -> Call:
        """The planning problem of a call with these inputs."""
        return OPERATIONS[self.operation].problem_of(**inputs, **self.our_keywords(options))

    def published(self, **wanted: object) -> tuple[Grid, ...]:
        """The grids whose options are as ``wanted``; if there is none, the first grid with these options."""
        first = self.grids[0]
        found = [grid for grid in self.grids if all(getattr(grid.options, each) == wanted[each] for each in wanted)]
        return tuple(found) or (replace(first, options=replace(first.options, **wanted)),)  # type: ignore[arg-type]

    def flops(self, shape: Shape, options: Options, backward: bool) -> int:
        """Floating-point operations of the forward pass, or of forward and backward, nothing computed twice."""
        forward = self.forward_flops(shape, options)
        if not backward:
            return forward
        return forward + (2 * forward if self.backward_flops is None else self.backward_flops(shape, options))

    def result_shapes(self, shape: Shape, options: Options) -> tuple[Shape, ...]:
        """The shapes of the results, from torch's rules, without computing anything."""
        operands = self.operands(shape, options)
        blank = {name: operand.blank() for name, operand in operands.items()}
        found = as_tuple(self.torch_expression(**blank, **self.keywords(options)))
        return tuple(tuple(tensor.shape) for tensor in found)

    def moved_bytes(self, shape: Shape, options: Options, dtype: torch.dtype, backward: bool) -> int:
        """Each input read and each result written once; backward reads inputs and upstream again, writes gradients."""
        operands = self.operands(shape, options).values()
        inputs = sum(math.prod(operand.shape) for operand in operands)
        gradients = sum(math.prod(operand.shape) for operand in operands if not operand.frozen)
        output = sum(math.prod(result) for result in self.result_shapes(shape, options))
        return dtype.itemsize * (inputs + output + (inputs + gradients + output if backward else 0))

    def inputs(self, shape: Shape, options: Options, draw: Draw) -> dict[str, Tensor]:
        """Fresh random inputs by name."""
        generator = draw.generator()
        return {name: draw.tensor(operand, generator) for name, operand in self.operands(shape, options).items()}
