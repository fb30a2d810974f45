"""What is verified and timed: a call with its inputs, and with backward its upstream gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .cases import Case, Draw, Inputs, Operand, Options, Results, Shape, as_tuple

# Values of an upstream gradient that differ from 0, however sparse the rest must be: there may be few in all.
_FEWEST_UPSTREAM = 64
_MOST_IN_ROTATION = 64


@dataclass(frozen=True)
class Work:
    """What a contender does once: the forward pass without a graph, or forward and backward with all gradients.

    Inputs that are no real numbers have none, nor have those that are ``frozen``. ``upstream`` holds a gradient of
    each result. ``rotation`` is the same with other tensors, to be done behind it: together they do not fit the L2
    cache, so that work of a few microseconds reads its inputs from memory.
    """

    inputs: Inputs
    upstream: tuple[Tensor, ...]
    backward: bool
    rotation: tuple[Work, ...] = ()
    frozen: frozenset[str] = frozenset()

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.upstream[0].device

    @property
    def leaves(self) -> Inputs:
        """The inputs that have a gradient, by name."""
        return {
            name: tensor
            for name, tensor in self.inputs.items()
            if tensor.is_floating_point() and name not in self.frozen
        }

    @property
    def count(self) -> int:
        """How many times the work is done by :meth:`run_all`."""
        return 1 + len(self.rotation)

    def run_all(self, call: Callable[..., Results]) -> None:
        """The work, and its rotation behind it."""
        for work in (self, *self.rotation):
            work.run(call)

    def run(self, call: Callable[..., Results]) -> tuple[Tensor, ...]:
        """The results, and with ``backward`` the gradient of each leaf in order."""
        results = self.forward(call)
        return (*results, *self.gradients(results))

    def forward(self, call: Callable[..., Results]) -> tuple[Tensor, ...]:
        """The results alone, with a graph if ``backward``."""
        with torch.set_grad_enabled(self.backward):
            return as_tuple(call(**self.inputs))

    def gradients(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """With ``backward`` the gradient of each leaf in order."""
        return torch.autograd.grad(results, tuple(self.leaves.values()), self.upstream) if self.backward else ()


def random_work(case: Case, options: Options, shape: Shape, draw: Draw, backward: bool) -> Work:
    """Fresh inputs, which want gradients if ``backward``, and random upstream gradients: N(0, 1), or integers."""
    inputs, another = case.inputs(shape, options, draw), draw.another(1)
    generator = another.generator()

    def upstream(result: Shape) -> Tensor:
        drawn = replace(
            another,
            dtype=case.result_dtype or draw.dtype,
            init="integer" if draw.init == "integer" else "normal",
            density=max(draw.density, min(1.0, _FEWEST_UPSTREAM / max(math.prod(result), 1))),
        ).tensor(Operand(result), generator)
        # What programs multiply a loss by: a loss scale, or the share of a micro-batch.
        return drawn if drawn.dim() else _power_of_two(drawn)

    frozen = frozenset(name for name, operand in case.operands(shape, options).items() if operand.frozen)
    work = Work(inputs, tuple(map(upstream, case.result_shapes(shape, options))), backward, frozen=frozen)
    for leaf in work.leaves.values():
        leaf.requires_grad_(backward)
    return work


def _power_of_two(value: Tensor) -> Tensor:
    """The one below, with the sign of the value; 0 of 0."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(mantissa.sign(), exponent - 1)


def timed_work(case: Case, options: Options, shape: Shape, draw: Draw, backward: bool, cold_cache_bytes: int) -> Work:
    """:func:`random_work` for a clock, which evicts so many bytes from the cache between two runs.

    Rotating work is followed by the same on other tensors, that many bytes of inputs in all.
    """
    count = 1
    if case.rotating:
        one = case.moved_bytes(shape, options, draw.dtype, False)
        count = min(_MOST_IN_ROTATION, max(2, -(-cold_cache_bytes // one)))
    first, *others = (random_work(case, options, shape, draw.another(7 * index), backward) for index in range(count))
    return replace(first, rotation=tuple(others))


def reference_results(case: Case, options: Options, work: Work) -> tuple[Tensor, ...]:
    """The results and all gradients in float64."""
    inputs = {
        name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in work.inputs.items()
    }
    for name in work.leaves:
        inputs[name].requires_grad_(work.backward)
    upstream = tuple(tensor.double() for tensor in work.upstream)
    return torch_results(case, options, replace(work, inputs=inputs, upstream=upstream, rotation=()))


def torch_results(case: Case, options: Options, work: Work) -> tuple[Tensor, ...]:
    """The results and all gradients of torch's expression, in the dtype of the inputs."""
    expression, keywords = case.yardstick or case.torch_expression, case.keywords(options)
    return work.run(lambda **inputs: expression(**inputs, **keywords))
