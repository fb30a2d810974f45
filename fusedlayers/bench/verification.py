"""Right before fast: y and every gradient of ours against float64, by the tolerance rule or exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ..closeness import Closeness, Evidence
from ..functional.switches import switched
from .cases import Case, Draw, Options, Shape
from .contenders import AUTO, FUSED, contender, our_plan, why_not_forced
from .exactness import exact_work, in_dtypes, inequality
from .work import Work, random_work, reference_results, torch_results

# Where a tensor is not close, so many times the draws are judged again: see ``closeness``.
AGAIN = 3


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
    exception is red; one that cannot run is "not run" and says why. The draws of the case are judged together, and
    where a tensor is not close, ``AGAIN`` times as many again.

    Raises:
        ValueError: ``init="integer"`` with an activation that leaves the integers, or sizes for which no density of
            non-zero values keeps every intermediate result exact.
    """
    found: dict[str, Verification] = {}
    evidence: dict[str, list[Evidence]] = {}
    again: dict[str, list[Evidence]] = {}
    paths: dict[str, str] = {}
    draws = 1 if init == "integer" else case.draws
    independent = None if case.independent is None else case.independent(shape, options)
    for drawn, (work, truth, yardstick) in enumerate(_drawn(case, options, shape, init, dtype, device, seed), 1):
        names = case.results[: len(work.upstream)]
        if case.backward:
            names += tuple(f"d{name}" for name in work.leaves)
        if not paths:
            paths, found = _paths(case, options, work, dtype)
        for name, path in paths.items():
            if name in found:
                continue
            ours = contender(name, case, options)
            try:
                with switched(ours.switches):
                    actual = work.run(ours.call)
            except Exception as error:
                found[name] = Verification(name, path, "red", f"{type(error).__name__}: {error}")
                continue
            if yardstick is None:
                found[name] = _judged(name, path, map(_exact, names, actual, in_dtypes(case, work, truth, dtype)))
                continue
            judged = (again if drawn > draws else evidence).setdefault(name, [Evidence(each) for each in names])
            for each, mine, theirs, right in zip(judged, actual, yardstick, truth, strict=True):
                each.add(mine, theirs, right)
        if drawn not in (draws, (1 + AGAIN) * draws):
            continue
        judged_now = {
            name: _judged(name, paths[name], map(close, _verdicts(case, independent, evidence[name], again.get(name))))
            for name in paths.keys() - found.keys()
        }
        if drawn > draws or not any(each.red for each in judged_now.values()):
            found |= judged_now
            break
    return [found[name] for name in paths]


def _verdicts(
    case: Case, independent: int | None, evidence: list[Evidence], again: list[Evidence] | None
) -> Iterator[Closeness]:
    """On all draws so far. A parameter's gradient alone is made of results that are fewer than its elements."""
    judges: Sequence[Evidence | None] = again or [None] * len(evidence)
    for each, further in zip(evidence, judges, strict=True):
        yield each.verdict(independent if each.name[1:] in case.parameters else None, further)


def _drawn(
    case: Case,
    options: Options,
    shape: Shape,
    init: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Iterator[tuple[Work, tuple[Tensor, ...], tuple[Tensor, ...] | None]]:
    """Work, the right results, and torch's where these are no integers; those of one draw are in memory at a time."""
    if init == "integer":
        work, truth = exact_work(case, options, shape, dtype=dtype, device=device, seed=seed)
        yield work, truth, None
        return
    upstream: tuple[Tensor, ...] = ()
    draw = Draw(dtype, device, init, seed)
    for index in range((1 + AGAIN) * case.draws):
        work = random_work(case, options, shape, draw.another(1009 * index), case.backward)
        # Errors grow with the upstream gradient: that of all draws is one.
        upstream = upstream or work.upstream
        work = replace(work, upstream=upstream)
        yield work, reference_results(case, options, work), torch_results(case, options, work)


def _paths(
    case: Case, options: Options, work: Work, dtype: torch.dtype
) -> tuple[dict[str, str], dict[str, Verification]]:
    """The paths of auto mode and of the forced kernels, and which of them need not or cannot be run."""
    plan = our_plan(case, options, work)
    reason = why_not_forced(plan, work.device, dtype)
    forced = "fused" if reason is not None else our_plan(case, options, work, backend="triton").path
    if reason is None and forced == plan.path:
        reason = "auto mode took this path already"
    left = {} if reason is None else {FUSED: Verification(FUSED, forced, "not run", reason)}
    return {AUTO: plan.path, FUSED: forced}, left


def _judged(name: str, path: str, found: Iterable[Finding]) -> Verification:
    findings = tuple(found)
    return Verification(name, path, "green" if all(finding.ok for finding in findings) else "red", "", findings)


def close(verdict: Closeness) -> Finding:
    """What the tolerance rule says of one tensor."""
    return Finding(
        verdict.name, verdict.ok, verdict.message, verdict.max_error_ratio, verdict.rms_ratio, verdict.worst_fraction
    )


def _exact(name: str, actual: Tensor, expected: Tensor) -> Finding:
    difference = inequality(name, actual, expected)
    return Finding(name, difference is None, difference or f"{name}: equal")
