"""Right before fast: y and every gradient of ours against float64, by the tolerance rule or exactly."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..closeness import Closeness, compare
from ..functional.switches import switched
from .cases import Case, Options, Shape
from .contenders import AUTO, FUSED, contender, our_plan, why_not_forced
from .exactness import exact_work, in_dtypes, inequality, random_work, reference_results, torch_results


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
        works, yardstick = [work], None
    else:
        drawn: dict[str, Any] = {"init": init, "dtype": dtype, "device": device, "backward": case.backward}
        works = [random_work(case, options, shape, seed=seed + 1009 * index, **drawn) for index in range(case.draws)]
        # Errors grow with the upstream gradient: that of all draws is one.
        works = [replace(each, upstream=works[0].upstream) for each in works]
        work = works[0]
        truth = _together([reference_results(case, options, each) for each in works])
        yardstick = _together([torch_results(case, options, each) for each in works])
    names = case.results[: len(work.upstream)]
    if case.backward:
        names += tuple(f"d{name}" for name in work.leaves)
    plan = our_plan(case, options, work)
    forced = why_not_forced(plan, device, dtype)
    kernels = our_plan(case, options, work, backend="triton").path if forced is None else "fused"

    def samples(name: str) -> int | None:
        owned = name.removeprefix("d") in case.parameters
        return max(1, case.independent(shape) * len(works)) if owned and case.independent is not None else None

    results = []
    for name, path in ((AUTO, plan.path), (FUSED, kernels)):
        if name == FUSED and forced is not None:
            results.append(Verification(name, path, "not run", forced))
            continue
        if name == FUSED and plan.path == kernels:
            results.append(Verification(name, path, "not run", "auto mode took this path already"))
            continue
        ours = contender(name, case, options)
        try:
            with switched(ours.switches):
                actual = _together([each.run(ours.call) for each in works])
        except Exception as error:
            results.append(Verification(name, path, "red", f"{type(error).__name__}: {error}"))
            continue
        if yardstick is None:
            findings = tuple(map(_exact, names, actual, in_dtypes(case, work, truth, dtype)))
        else:
            findings = tuple(
                close(compare(mine, theirs, right, name=name, independent=samples(name), draws=len(works) > 1))
                for name, mine, theirs, right in zip(names, actual, yardstick, truth, strict=True)
            )
        status = "green" if all(finding.ok for finding in findings) else "red"
        results.append(Verification(name, path, status, "", findings))
    return results


def close(verdict: Closeness) -> Finding:
    """What the tolerance rule says of one tensor."""
    return Finding(
        verdict.name, verdict.ok, verdict.message, verdict.max_error_ratio, verdict.rms_ratio, verdict.worst_fraction
    )


def _together(draws: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of several draws, stacked."""
    return draws[0] if len(draws) == 1 else tuple(map(torch.stack, zip(*draws, strict=True)))


def _exact(name: str, actual: Tensor, expected: Tensor) -> Finding:
    difference = inequality(name, actual, expected)
    return Finding(name, difference is None, difference or f"{name}: equal")
