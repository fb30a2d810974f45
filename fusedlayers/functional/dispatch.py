"""From a problem to a plan: the user's switches, the device's facts, and one INFO line per decision."""

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .. import planning, releases
from ..devices import describe as describe
from ..devices import test_release
from ..planning import Decision, Device
from .call import observed, traced, with_known_sizes
from .switches import backend, strict

logger = logging.getLogger("fusedlayers")


class Decisions(Counter[str]):
    """Counts of calls by operation and path, and the problems that were planned for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[Any, None] = {}


# Not None inside :func:`decisions`.
counted: Decisions | None = None


def dispatch(problem: Any, device: torch.device) -> Any:
    """The plan of ``problem`` on ``device`` under the user's switches.

    Raises:
        RuntimeError: the kernels cannot run, and ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` is set.
    """
    wish, must = backend(), strict()
    if observed():
        problem = with_known_sizes(problem)
    if counted is not None:
        counted.problems[problem] = None
    plan = _cached_plan(problem, facts_for(problem, device, wish), wish)
    _refuse_torch(plan, wish, must)
    return plan


def plan_on_card(problem: Any, facts: Device) -> Any:
    """The plan of ``problem`` for a GPU with these ``facts``; neither cached nor logged.

    Raises:
        RuntimeError: as :func:`dispatch` would there.
    """
    wish = backend()
    plan = planning.plan(problem, facts, wish)
    _refuse_torch(plan, wish, strict())
    return plan


def _refuse_torch(plan: Decision, wish: str, must: bool) -> None:
    """Raises if the user's switches require kernels and these cannot run."""
    if plan.unsupported is not None and not plan.problem.empty and (wish == "triton" or (must and wish == "auto")):
        switch = "FUSEDLAYERS_BACKEND=triton" if wish == "triton" else "FUSEDLAYERS_STRICT=1"
        raise RuntimeError(f"{switch} is set, but {plan.problem.operation} cannot run in Triton: {plan.unsupported}")


def facts_for(problem: Any, device: torch.device, wish: str) -> Device:
    """The device's facts for planning ``problem``, after the self-test of an unknown release of Triton.

    The self-test runs once, before auto mode takes the first kernel, but not while a call is captured or traced.
    """
    facts = describe(device)
    if not facts.release_note or not facts.left_to_torch or wish != "auto":
        return facts
    trusting = replace(facts, release_note="", left_to_torch="", untested=False)
    if _launches(planning.plan(problem, trusting, wish)) == _launches(planning.plan(problem, facts, wish)):
        return facts
    if facts.untested and not (problem.captured or traced()):
        test_release(facts, device)
        facts = describe(device)
        if not facts.left_to_torch:
            return facts
    later = "; a plain call before what is captured or compiled, which holds torch's operations now, tests them, too"
    releases.warn_once(
        f"auto mode takes torch where kernels may be faster: {facts.left_to_torch}{later if facts.untested else ''}"
    )
    return facts


def _launches(plan: Decision) -> tuple[str, dict[str, tuple[str, ...]]]:
    return plan.path, planning.configurations(plan)


def plan_on_path(problem: Any, path: str, device: torch.device) -> Any:
    """The plan of ``problem`` on a ``path`` that was chosen for other sizes.

    Raises:
        RuntimeError: the path cannot run it.
    """
    # The user's backend first: the path alone does not say which of several products run in kernels.
    forced = ("triton", "torch") if path in planning.KERNEL_PATHS else ("torch", "triton")
    for wish in (backend(), *forced):
        plan = _cached_plan(problem, describe(device), wish)
        if plan.path == path:
            return plan
    reason = dict(plan.rejected).get(path, "it is none of the paths of such a call")
    raise RuntimeError(f"{problem.operation} was compiled for its {path} path, which cannot run these sizes: {reason}")


def count(plan: Decision) -> None:
    """Counts a call and its path for :func:`decisions`."""
    if counted is not None:
        counted[f"{plan.problem.operation} {plan.path}"] += 1


@contextmanager
def decisions() -> Iterator[Decisions]:
    """Counts calls by operation and path ("ffn fused") inside the context, which does not nest."""
    global counted
    counted = Decisions()
    try:
        yield counted
    finally:
        counted = None


@functools.lru_cache(maxsize=4096)
def _cached_plan(problem: Any, device: Device, wish: str) -> Any:
    plan: Decision = planning.plan(problem, device, wish)
    if logger.isEnabledFor(logging.INFO):
        reasons = dict(plan.rejected)
        if (unmeasured := planning.unmeasured(device)) in reasons.values():
            # One line for all operations, as the reason is the same.
            _log_once("auto mode", "torch", str(unmeasured))
            if plan.path == "torch":
                return plan
            reasons = {}
        told = planning.KERNEL_PATHS if plan.path == "torch" else ("fused",)
        # Drop the sizes, or every sequence length would log its own line; give each reason once.
        said = "; ".join(dict.fromkeys(reasons[path].split(":")[0] for path in told if path in reasons))
        if not said:
            # The kernel path of this operation may have another name.
            said = plan.why_torch(device).split(":")[0] if plan.path == "torch" else plan.reason
        _log_once(problem.operation, plan.path, said)
    return plan


@functools.cache
def _log_once(operation: str, path: str, reason: str) -> None:
    logger.info("%s takes the %s path: %s", operation, path, reason)
