"""Right before fast: y and every gradient of ours against float64, by the tolerance rule or exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..closeness import compare
from .cases import Case, Operand, Options, Shape, draw
from .contenders import AUTO, EAGER, FUSED, Work, contender, our_plan, switched, why_not_forced

# Activations that map integers to integers.
INTEGER_ACTIVATIONS = ("identity", "relu", "relu2")
INTEGER_OPERATIONS = ("sum", "max", "min", "absmax", "sumsq")
_MOST_HALVINGS = 20
_MOST_IN_ROTATION = 64


@dataclass(frozen=True)
class Finding:
    """One tensor of one contender; the ratios are those of ``closeness``, and absent in an exact comparison."""

    tensor: str
    ok: bool
    message: str
    max_error_ratio: float | None = None
    rms_ratio: float | None = None
    worst_fraction: float | None = None


@dataclass(frozen=True)
class Verification:
    """What was found about one contender: ``status`` is "green", "red" or "not run", the last with a reason."""

    contender: str
    path: str
    status: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def red(self) -> bool:
        return self.status == "red"

    def summary(self) -> str:
        """One line: the verdict, and for each tensor the share of its limit that was used."""
        if self.status == "not run":
            return f"{self.contender}: not run: {self.reason}"
        who = f"{self.contender} ({self.path} path)"
        if self.red:
            faults = [self.reason] if self.reason else [finding.message for finding in self.findings if not finding.ok]
            return f"{who}: RED: " + "; ".join(faults)
        used = [
            finding.tensor if finding.worst_fraction is None else f"{finding.tensor} {finding.worst_fraction:.2f}"
            for finding in self.findings
        ]
        exact = all(finding.worst_fraction is None for finding in self.findings)
        return f"{who}: green, {'equal' if exact else 'share of the limit used'}: {', '.join(used)}"

    def as_json(self) -> dict[str, object]:
        """For the record; infinite ratios, which JSON lacks, become None."""
        plain = asdict(self)
        for finding in plain["findings"]:
            for key, value in finding.items():
                if isinstance(value, float) and not math.isfinite(value):
                    finding[key] = None
        return plain


def verify(
    case: Case, options: Options, shape: Shape, *, init: str, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> list[Verification]:
    """Auto mode and the forced kernels, forward and, if the case has it, backward, against the reference in float64.

    The upstream gradient is random (N(0, 1), or integers with ``init="integer"``). A kernel that fails with an
    exception is red; one that cannot run is "not run" and says why.

    Raises:
        ValueError: ``init="integer"`` with an activation that leaves the integers, or sizes for which no density of
            non-zero values keeps every intermediate result exact.
    """
    if init == "integer":
        work, truth = exact_work(case, options, shape, dtype=dtype, device=device, seed=seed)
        yardstick = None
    else:
        work = random_work(
            case, options, shape, init=init, dtype=dtype, device=device, seed=seed, backward=case.backward
        )
        truth = reference_results(case, options, work)
        yardstick = work.run(contender(EAGER, case, options).call)
    names = case.results[: len(work.upstream)]
    if case.backward:
        names += tuple(f"d{name}" for name in work.inputs)
    plan = our_plan(case, options, work)
    forced = why_not_forced(plan, device, dtype)
    results = []
    for name, path in ((AUTO, plan.path), (FUSED, "fused")):
        if name == FUSED and forced is not None:
            results.append(Verification(name, path, "not run", forced))
            continue
        if name == FUSED and plan.path == "fused":
            results.append(Verification(name, path, "not run", "auto mode took this path already"))
            continue
        ours = contender(name, case, options)
        try:
            with switched(ours.switches):
                actual = work.run(ours.call)
        except Exception as error:
            results.append(Verification(name, path, "red", f"{type(error).__name__}: {error}"))
            continue
        if yardstick is None:
            findings = tuple(map(_exact, names, actual, (tensor.to(dtype) for tensor in truth)))
        else:
            findings = tuple(map(_close, names, actual, yardstick, truth))
        status = "green" if all(finding.ok for finding in findings) else "red"
        results.append(Verification(name, path, status, "", findings))
    return results


def random_work(
    case: Case, options: Options, shape: Shape, *, init: str, dtype: torch.dtype, device: torch.device, seed: int,
    backward: bool, density: float = 1.0,
) -> Work:  # fmt: skip
    """Fresh inputs, which want gradients if ``backward``, and random upstream gradients."""
    inputs = case.inputs(shape, options, init=init, dtype=dtype, device=device, seed=seed, density=density)
    generator = torch.Generator(device).manual_seed(seed + 1)
    upstream_init = "integer" if init == "integer" else "normal"
    upstream = tuple(
        draw(Operand(result), upstream_init, dtype, device, generator, density)
        for result in case.result_shapes(shape, options)
    )
    return Work({name: tensor.requires_grad_(backward) for name, tensor in inputs.items()}, upstream, backward)


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
    inputs = {name: tensor.detach().double().requires_grad_(work.backward) for name, tensor in work.inputs.items()}
    upstream = tuple(tensor.double() for tensor in work.upstream)
    return Work(inputs, upstream, work.backward).run(contender(EAGER, case, options).call)


def exact_work(
    case: Case, options: Options, shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Work, tuple[Tensor, ...]]:
    """Integer inputs in -2 … 2 so sparse that every result of every step is exact in ``dtype``, and the results."""
    if options.activation not in INTEGER_ACTIVATIONS:
        known = ", ".join(INTEGER_ACTIVATIONS)
        raise ValueError(
            f"--init integer: activation {options.activation} leaves the integers; expected one of {known}"
        )
    for halvings in range(_MOST_HALVINGS):
        work = random_work(
            case, options, shape, init="integer", dtype=dtype, device=device, seed=seed, backward=case.backward,
            density=2.0**-halvings,
        )  # fmt: skip
        # In one thread, because the watch belongs to a thread.
        with torch.autograd.set_multithreading_enabled(False), _ExactnessWatch(dtype) as watch:
            truth = reference_results(case, options, work)
        if watch.exact:
            if not all(bool(tensor.any()) for tensor in truth):
                break
            return work, truth
    raise ValueError(
        f"--init integer: no density of non-zero values keeps every step of {'x'.join(map(str, shape))} "
        f"exact in {dtype} and every result non-zero; choose other sizes"
    )


class _ExactnessWatch(TorchDispatchMode):
    """Whether every float64 result of every torch operation is an integer that ``dtype`` counts to.

    One bit is spared for partial sums, which may be a little larger than their total.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.largest = 1 / torch.finfo(dtype).eps
        self.exact = True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and tensor.numel():
                integers = bool((tensor == tensor.round()).all())
                self.exact &= integers and float(tensor.abs().max()) <= self.largest
        return result


def _close(name: str, actual: Tensor, torch_result: Tensor, truth: Tensor) -> Finding:
    verdict = compare(actual, torch_result, truth, name=name)
    return Finding(
        name, verdict.ok, verdict.message, verdict.max_error_ratio, verdict.rms_ratio, verdict.worst_fraction
    )


def _exact(name: str, actual: Tensor, expected: Tensor) -> Finding:
    for what in ("shape", "dtype"):
        found, wanted = getattr(actual, what), getattr(expected, what)
        if found != wanted:
            return Finding(name, False, f"{name}: {what} {found}, expected {wanted}")
    if torch.equal(actual, expected):
        return Finding(name, True, f"{name}: equal")
    actual, expected = actual.detach(), expected.detach()
    different = actual != expected
    first = tuple(int(i) for i in different.nonzero()[0])
    return Finding(
        name,
        False,
        f"{name}: NOT equal at {int(different.sum())} of {actual.numel()} elements, first at {first}: "
        f"{float(actual[first])}, expected {float(expected[first])}",
    )
