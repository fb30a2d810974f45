"""A benchmark case: one operation of the library, with its letters, its grids, inputs and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    """What is benchmarked of a case, beside its shape; a case ignores those that are none of its flags."""

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


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation.

    ``operation`` names the public function that plans it. ``ours`` and ``torch_expression`` take the inputs of
    ``operands`` by name and then ``keywords`` of the options. ``forward_flops`` counts the products of the forward
    pass; each product has two of the same size in the backward pass, or as many as ``backward_products`` says.
    ``parameters`` are the inputs that a module would own. ``results`` names what the operation returns, a tensor or a
    tuple, the last of which may be None; ``result_dtype`` is theirs where it is not that of the inputs. ``yardstick``
    is torch's expression in less memory, for verification, which judges so many ``draws`` of inputs together. A
    parameter's gradient is made of so many ``independent`` results, where a tile of it has more elements. Without
    ``backward`` the forward pass alone is benchmarked. ``rotating`` work takes a few microseconds, and is timed over
    many inputs in a row. Without ``grids`` the self-test alone runs the case. ``trials`` are those of the self-test on
    a GPU, one at least for every tile configuration that the planner can choose there; ``peers`` are others' versions
    by the name of a contender: what imports them and gives a function of the inputs; ``few_trials`` those for Triton's
    interpreter. ``place`` says where the case stands among the others, in commands and in tables.
    """

    name: str
    letters: tuple[str, ...]
    meaning: str
    parameters: frozenset[str]
    flags: frozenset[str]
    grids: tuple[Grid, ...]
    operands: Callable[[Shape, Options], dict[str, Operand]]
    forward_flops: Callable[[Shape, Options], int]
    ours: Callable[..., Results]
    torch_expression: Callable[..., Results]
    operation: str
    keywords: Callable[[Options], dict[str, object]]
    trials: Callable[[Device], Iterable[Trial]]
    few_trials: tuple[Trial, ...]
    place: int
    results: tuple[str, ...] = ("y",)
    result_dtype: torch.dtype | None = None
    yardstick: Callable[..., Results] | None = None
    draws: int = 1
    independent: Callable[[Shape, Options], int] | None = None
    peers: Mapping[str, Callable[[], Callable[..., Results]]] = field(default_factory=dict)
    backward: bool = True
    has_activation: bool = True
    rotating: bool = False
    backward_products: int = 2

    def our_keywords(self, options: Options) -> dict[str, object]:
        """The keywords of ``ours``."""
        recomputes = options.recompute is True and "recompute" in self.flags
        return self.keywords(options) | ({"recompute": True} if recomputes else {})

    def peer(self, name: str, options: Options) -> Callable[..., Results]:
        """Another library's version, which knows no other options than those of the published grids.

        Raises:
            ImportError: it is not installed, has not what the case needs, or fails when it is imported.
            KeyError: the case has none by this name with these options.
        """
        if all(replace(options, recompute=grid.options.recompute) != grid.options for grid in self.grids):
            raise KeyError(name)
        make = self.peers[name]
        try:
            return make()
        except ImportError:
            raise
        except Exception as error:
            # One beside releases of its libraries that it does not know may raise anything.
            raise ImportError(f"{name} fails when it is imported: {type(error).__name__}: {error}") from error

    def problem(self, inputs: Inputs, options: Options) -> Call:
        """The planning problem of a call with these inputs."""
        return OPERATIONS[self.operation].problem_of(**inputs, **self.our_keywords(options))

    def grid(self, gated: bool, skewed: bool = False) -> Grid:
        """The published grid with or without a gate, of either routing."""
        return next(grid for grid in self.grids if (grid.options.gated, grid.options.skewed) == (gated, skewed))

    def reductions(self, op: str | None, dim: int | None) -> tuple[Grid, ...]:
        """The published grids of a reduction (None: of any); of one that has none, the first grid with its options."""
        known = (self.grids[0].options.op if op is None else op, self.grids[0].options.dim if dim is None else dim)
        found = [g for g in self.grids if op in (None, g.options.op) and dim in (None, g.options.dim)]
        return tuple(found) or (
            replace(self.grids[0], options=replace(self.grids[0].options, op=known[0], dim=known[1])),
        )

    def flops(self, shape: Shape, options: Options, backward: bool) -> int:
        """Floating-point operations of the forward pass, or of forward and backward, nothing computed twice."""
        return self.forward_flops(shape, options) * (1 + (self.backward_products if backward else 0))

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
    if operand.skewed:
        likely = 1 / torch.arange(1, operand.classes + 1, device=device)
        drawn = likely.multinomial(math.prod(operand.shape), replacement=True, generator=generator)
        return drawn.view(operand.shape)
    if operand.classes:
        return torch.randint(operand.classes, operand.shape, generator=generator, device=device)
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
