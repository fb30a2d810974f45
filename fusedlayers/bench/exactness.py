"""Integers whose every intermediate result is exact, so that right numbers are equal numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .cases import Case, Draw, Options, Shape
from .work import Work, random_work, reference_results

# Activations that map integers to integers.
INTEGER_ACTIVATIONS = ("identity", "relu", "relu2")
INTEGER_OPERATIONS = ("sum", "max", "min", "absmax", "sumsq")
# Densities that are tried, each 0.7 times the one before; the last is 2^-20.
_DENSITIES = tuple(2.0 ** (-step / 2) for step in range(41))


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
        work = random_work(case, options, shape, Draw(dtype, device, "integer", seed, density), case.backward)
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
                # Elements that a maximum leaves out are infinite, and nothing else uses them.
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
