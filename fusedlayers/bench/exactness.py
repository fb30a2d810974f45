"""Integers whose every intermediate result is exact, so that right numbers are equal numbers, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .cases import Case, Operand, Options, Shape, draw
from .contenders import EAGER, Work, contender

# Activations that map integers to integers.
INTEGER_ACTIVATIONS = ("identity", "relu", "relu2")
INTEGER_OPERATIONS = ("sum", "max", "min", "absmax", "sumsq")
# Densities that are tried, each 0.7 times the one before; the last is 2^-20.
_DENSITIES = tuple(2.0 ** (-step / 2) for step in range(41))
# Values of an upstream gradient that differ from 0, however sparse the rest must be: there may be few in all.
_FEWEST_UPSTREAM = 64
_MOST_IN_ROTATION = 64


def random_work(
    case: Case, options: Options, shape: Shape, *, init: str, dtype: torch.dtype, device: torch.device, seed: int,
    backward: bool, density: float = 1.0,
) -> Work:  # fmt: skip
    """Fresh inputs, which want gradients if ``backward``, and random upstream gradients."""
    inputs = case.inputs(shape, options, init=init, dtype=dtype, device=device, seed=seed, density=density)
    generator = torch.Generator(device).manual_seed(seed + 1)
    upstream_init = "integer" if init == "integer" else "normal"
    upstream = tuple(
        draw(
            Operand(result),
            upstream_init,
            case.result_dtype or dtype,
            device,
            generator,
            max(density, min(1.0, _FEWEST_UPSTREAM / max(math.prod(result), 1))),
        )
        for result in case.result_shapes(shape, options)
    )
    # What programs multiply a loss by: a loss scale, or the share of a micro-batch.
    upstream = tuple(each if each.dim() else _power_of_two(each) for each in upstream)
    frozen = frozenset(name for name, operand in case.operands(shape, options).items() if operand.frozen)
    work = Work(inputs, upstream, backward, frozen=frozen)
    for leaf in work.leaves.values():
        leaf.requires_grad_(backward)
    return work


def _power_of_two(value: Tensor) -> Tensor:
    """The one below, with the sign of the value; 0 of 0."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(mantissa.sign(), exponent - 1)


def rotating_work(
    case: Case, options: Options, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int,
    least_bytes: int, **drawn: Any,
) -> Work:  # fmt: skip
    """:func:`random_work` behind which the same is done on other tensors, ``least_bytes`` of inputs in all."""
    one = case.moved_bytes(shape, options, dtype, False)
    count = min(_MOST_IN_ROTATION, max(2, -(-least_bytes // one)))
    works = [
        random_work(case, options, shape, dtype=dtype, device=device, seed=seed + 7 * index, **drawn)
        for index in range(count)
    ]
    return replace(works[0], rotation=tuple(works[1:]))


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
    case = case if case.yardstick is None else replace(case, torch_expression=case.yardstick)
    return work.run(contender(EAGER, case, options).call)


def exact_work(
    case: Case, options: Options, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Work, tuple[Tensor, ...]]:
    """Integer inputs in -2 … 2 so sparse that every result of every step is exact in ``dtype``, and the results."""
    if options.activation not in INTEGER_ACTIVATIONS:
        known = ", ".join(INTEGER_ACTIVATIONS)
        raise ValueError(
            f"--init integer: activation {options.activation} leaves the integers; expected one of {known}"
        )
    for density in _DENSITIES:
        work = random_work(
            case, options, shape, init="integer", dtype=dtype, device=device, seed=seed, backward=case.backward,
            density=density,
        )  # fmt: skip
        # In one thread, because the watch belongs to a thread.
        with torch.autograd.set_multithreading_enabled(False), ExactnessWatch() as watch:
            truth = reference_results(case, options, work)
        if watch.within(case.result_dtype or dtype):
            if not all(bool(tensor.any()) for tensor in truth):
                break
            return work, truth
    raise ValueError(
        f"--init integer: no density of non-zero values keeps every step of {'x'.join(map(str, shape))} "
        f"exact in {dtype} and every result non-zero; choose other sizes"
    )


def in_dtypes(case: Case, work: Work, truth: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """The results and gradients of a case in the dtypes that it has them in."""
    count = len(work.upstream)
    results = [tensor.to(case.result_dtype or dtype) for tensor in truth[:count]]
    return [*results, *(tensor.to(dtype) for tensor in truth[count:])]


class ExactnessWatch(TorchDispatchMode):
    """Of the float64 results of all torch operations: the largest magnitude, and whether all are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0
        self.integers = True

    def within(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` counts to every one of them.

        One bit is spared for partial sums, which may be a little larger than their total.
        """
        return self.integers and self.largest <= 1 / torch.finfo(dtype).eps

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and tensor.numel():
                # What does not take part in a maximum is infinite, and takes part in nothing else.
                self.largest = max(self.largest, float(tensor.abs().nan_to_num(posinf=0.0).max()))
                self.integers &= bool((tensor == tensor.round()).all())
        return result


def inequality(name: str, actual: Tensor, expected: Tensor) -> str | None:
    """How ``actual`` differs from ``expected`` in shape, dtype or any value, or None."""
    for what in ("shape", "dtype"):
        found, wanted = getattr(actual, what), getattr(expected, what)
        if found != wanted:
            return f"{name}: {what} {found}, expected {wanted}"
    if torch.equal(actual, expected):
        return None
    actual, expected = actual.detach(), expected.detach()
    different = actual != expected
    first = tuple(int(i) for i in different.nonzero()[0])
    return (
        f"{name}: NOT equal at {int(different.sum())} of {actual.numel()} elements, first at {first}: "
        f"{float(actual[first])}, expected {float(expected[first])}"
    )
