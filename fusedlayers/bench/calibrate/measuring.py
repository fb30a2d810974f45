"""One call, right first and then timed: our kernels beside the best of torch, launched and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import planning
from ...planning import Decision
from ...planning.calibration import Entry, features
from ..cases import DTYPES
from ..cases.trial import Trial
from ..contenders import AUTO, COMPILED, EAGER, FUSED, Work, contender, our_plan
from ..exactness import random_work, rotating_work
from ..timing import NotTimed, Spread, Timing, clock_for, measure
from ..verification import verify

# A win is at least so much faster than the best of torch, and so many times the spread of either.
LEAST_GAIN, LEAST_SPREADS = 0.03, 2
TORCH = (EAGER, COMPILED)


class DroppedError(Exception):
    """Nothing can be recorded of a call, for this reason."""


@dataclass(frozen=True)
class Way:
    """A way of ours to run a call: the backend that stands for it, and its plan, launched and replayed."""

    choice: str
    plans: tuple[Decision, Decision]


def entries_of(trial: Trial, device: torch.device, seconds: float) -> list[Entry]:
    """What is to be recorded of a call: one entry launched and, where it can be recorded into a graph, one replayed.

    Raises:
        DroppedError: kernels cannot run it, or do not compile, or give wrong numbers.
    """
    case, options = trial.prepared()
    dtype = DTYPES[trial.dtype]
    for found in verify(case, options, trial.shape, init="normal", dtype=dtype, device=device):
        if found.red:
            raise DroppedError(found.summary())
    # A call's compiled code is of no use to the next one, and many would exceed the compiler's limit of variants.
    torch._dynamo.reset()
    clock = clock_for(device)
    drawn: dict[str, Any] = {
        "init": "normal", "dtype": dtype, "device": device, "seed": 2, "backward": case.backward,
    }  # fmt: skip
    if case.rotating:
        work = rotating_work(case, options, trial.shape, least_bytes=clock.cold_cache_bytes, **drawn)
    else:
        work = random_work(case, options, trial.shape, **drawn)
    ways = ways_of(trial, work)
    names = [*TORCH, *ways]
    timings = measure([contender(name, case, options) for name in names], work, seconds=seconds, clock=clock)
    forced = timings[FUSED]
    if isinstance(forced, NotTimed):
        raise DroppedError(forced.reason)
    problem = ways[FUSED].plans[0].problem
    found_entries = []
    for replayed in (False, True):
        if entry := decide(features(problem), ways, timings, replayed):
            found_entries.append(entry)
    return found_entries


def ways_of(trial: Trial, work: Work) -> dict[str, Way]:
    """By contender: kernels wherever they run, and what auto mode takes, where that is kernels otherwise.

    Raises:
        DroppedError: kernels cannot run the call.
    """
    case, options = trial.prepared()

    def plans(backend: str) -> tuple[Decision, Decision]:
        launched, replayed = (our_plan(case, options, work, captured, backend) for captured in (False, True))
        return launched, replayed

    forced, auto = plans("triton"), plans("auto")
    if forced[0].unsupported is not None:
        raise DroppedError(forced[0].unsupported)
    ways = {FUSED: Way("triton", forced)}
    if any(_differ(*pair) for pair in zip(auto, forced, strict=True)):
        ways[AUTO] = Way("auto", auto)
    return ways


def _differ(auto: Decision, forced: Decision) -> bool:
    """Whether auto mode takes kernels, and others than those that are forced."""
    if auto.path == "torch":
        return False
    return auto.path != forced.path or planning.configurations(auto) != planning.configurations(forced)


def decide(
    found: Any, ways: Mapping[str, Way], timings: Mapping[str, Timing | NotTimed], replayed: bool
) -> Entry | None:
    """Which way is to be taken, by the times; None where none of ours or none of torch's has one."""

    def times(names: Sequence[str]) -> dict[str, Spread]:
        known = {name: timing for name in names if isinstance(timing := timings.get(name), Timing)}
        spreads = {name: timing.replayed if replayed else timing.launched for name, timing in known.items()}
        return {name: spread for name, spread in spreads.items() if spread is not None}

    ours = {
        name: spread
        for name, spread in times(list(ways)).items()
        if name == FUSED or _differ(ways[name].plans[replayed], ways[FUSED].plans[replayed])
    }
    theirs = times(TORCH)
    if not ours or not theirs:
        return None
    best = min(ours, key=lambda name: ours[name].median)
    torch_best = min(theirs.values(), key=lambda spread: spread.median)
    speed = torch_best.median / ours[best].median
    spread = max((each.third_quartile - each.first_quartile) / each.median for each in (torch_best, ours[best]))
    if speed - 1 < max(LEAST_GAIN, LEAST_SPREADS * spread):
        return Entry(found, replayed, "torch", "torch", speed, spread)
    return Entry(found, replayed, ways[best].choice, ways[best].plans[replayed].path, speed, spread)
