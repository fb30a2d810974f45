"""How long each contender takes, all interleaved in one run: medians and quartiles of launched and replayed work.

One round visits every entrant once, in an order that is drawn for each round, so that clocks and temperature drift over
all of them alike, and none always follows the same other one, whose code the host's caches hold. A visit starts on an
idle device and runs the entrant a few times in a row, as a training loop would: the host launches ahead of the device
as far as it can. The first of these runs is not counted. The L2 cache is overwritten before each run, so that it reads
its inputs from memory; that takes tens of microseconds, in which the host may already launch. Work of a few
microseconds is rotated besides: one run does it many times, on as many inputs. So a *launched* time shows the host only
where the host falls further behind. *Replayed* is the same work inside a CUDA graph: device time alone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..functional.switches import switched
from .contenders import Contender

WARM_UP_RUNS = 3
# Rounds at the start whose times are thrown away: the clocks are still rising.
DISCARDED_ROUNDS = 2
FEWEST_ROUNDS, MOST_ROUNDS = 7, 50
# Runs of one visit on a GPU; the first starts from an idle device and is not counted.
RUNS_PER_VISIT = 5
# A launched time this far above the replayed one, or host time this close to it, means that the host sets the pace.
_HOST_BOUND_GAP, _HOST_BOUND_SHARE = 1.15, 0.9


@dataclass(frozen=True)
class Spread:
    """Seconds: the median and quartiles of ``repeats`` measurements, and the fastest one."""

    median: float
    first_quartile: float
    third_quartile: float
    minimum: float
    repeats: int


@dataclass(frozen=True)
class Timing:
    """The times of one contender; ``replayed`` is None where no graph could be captured, for ``replay_reason``.

    ``host_seconds`` is what the host needs to launch the work once. ``host_bound``: the launched time shows the host.
    ``rounds`` are the launched times in the order of the rounds, which all contenders share.
    """

    launched: Spread
    replayed: Spread | None
    replay_reason: str
    host_seconds: float
    host_bound: bool
    rounds: tuple[float, ...] = ()

    def over(self, other: Timing) -> float:
        """The median of this launched time over another one of the same round.

        A host that is slower for a while is so for both, where two medians may be those of different whiles.
        """
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    @property
    def device_seconds(self) -> float:
        """The best estimate of the time on the device alone."""
        return (self.replayed or self.launched).median


@dataclass(frozen=True)
class NotTimed:
    """A contender without times, and why: it failed, or was not run."""

    reason: str
    status: str = "not timed"  # of its entry in a record


@dataclass(frozen=True)
class Entrant:
    """One thing to time, and the environment variables that hold meanwhile."""

    run: Callable[[], object]
    switches: Mapping[str, str]


# By contender and kind ("launched" or "replayed").
Times = dict[tuple[str, str], list[float]]


def spread(times: list[float]) -> Spread:
    """Median and quartiles of the times."""
    ordered = sorted(times)
    first, median, third = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(median, first, third, ordered[0], len(ordered))


class Workload(Protocol):
    """What is timed: ``call`` is launched, or replayed, in one go as often as ``count`` says."""

    @property
    def device(self) -> torch.device: ...

    @property
    def count(self) -> int: ...

    def run_all(self, call: Callable[..., Any]) -> None: ...


def measure(
    contenders: list[Contender],
    work: Workload,
    *,
    seconds: float,
    clock: Clock | None = None,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Timing | NotTimed]:
    """Times of all contenders on the same work, in about ``seconds`` beside warm-up, compilation and capture.

    A time is that of the work done once; where it rotates, all of it is launched, or replayed, in one go. ``alone`` is
    entered while the clock runs.
    """
    clock = clock or clock_for(work.device)
    entrants: dict[tuple[str, str], Entrant] = {}
    failures: dict[str, NotTimed] = {}
    replay_reasons: dict[str, str] = {}
    for contender in contenders:
        launch = partial(work.run_all, contender.call)
        with switched(contender.switches):
            try:
                clock.warm_up(launch)
            except Exception as error:
                failures[contender.name] = NotTimed(f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            replay, replay_reasons[contender.name] = clock.capture(launch) if contender.recorded else (None, "")
        entrants[contender.name, "launched"] = Entrant(launch, contender.switches)
        if replay is not None:
            entrants[contender.name, "replayed"] = Entrant(replay, {})
        del replay  # The entrant alone keeps the graph and its memory.
    with alone():
        *measured, lost = _rounds(entrants, clock, seconds)
    times, host_times = (
        {name: [time / work.count for time in found] for name, found in kind.items()} for kind in measured
    )
    for (name, way), reason in lost.items():
        if way == "launched":
            failures[name] = NotTimed(reason)
        else:
            replay_reasons[name] = reason
    timings: dict[str, Timing | NotTimed] = {}
    for contender in contenders:
        name = contender.name
        if name in failures:
            timings[name] = failures[name]
            continue
        launched_spread = spread(times[name, "launched"])
        replayed_spread = spread(times[name, "replayed"]) if (name, "replayed") in times else None
        host = statistics.median(host_times[name, "launched"])
        timings[name] = Timing(
            launched_spread,
            replayed_spread,
            replay_reasons[name],
            host,
            clock.separate_host and _host_bound(launched_spread, replayed_spread, host),
            tuple(times[name, "launched"]),
        )
    return timings


def _host_bound(launched: Spread, replayed: Spread | None, host_seconds: float) -> bool:
    if replayed is not None:
        return launched.median > _HOST_BOUND_GAP * replayed.median
    return host_seconds > _HOST_BOUND_SHARE * launched.median


def _rounds(
    entrants: dict[tuple[str, str], Entrant], clock: Clock, seconds: float
) -> tuple[Times, Times, dict[tuple[str, str], str]]:
    """Seconds on the device and seconds of the host, per entrant and round; and why entrants were given up.

    Where memory does not suffice to launch a contender, its graph goes first, as a graph keeps all that it works in.
    """
    device_times: Times = {name: [] for name in entrants}
    host_times: Times = {name: [] for name in entrants}
    lost: dict[tuple[str, str], str] = {}
    deadline = None
    order = random.Random(0)
    for round_number in range(DISCARDED_ROUNDS + MOST_ROUNDS):
        if round_number == DISCARDED_ROUNDS:
            deadline = time.perf_counter() + seconds
        for name in order.sample(list(entrants), len(entrants)):
            if name in lost:
                continue
            # Setting the switches is no part of the work.
            try:
                with switched(entrants[name].switches):
                    measured = clock.visit(entrants[name].run)
            except torch.OutOfMemoryError as error:
                graph = (name[0], "replayed")
                given_up = graph if graph in entrants else name
                lost[given_up] = f"{type(error).__name__}: {error}".splitlines()[0]
                for kind in (entrants, device_times, host_times):
                    del kind[given_up]
                continue
            if round_number >= DISCARDED_ROUNDS:
                device_times[name] += [device for device, _ in measured]
                host_times[name] += [host for _, host in measured]
        enough = round_number + 1 >= DISCARDED_ROUNDS + FEWEST_ROUNDS
        if enough and deadline is not None and time.perf_counter() > deadline:
            break
    return device_times, host_times, lost


class Clock:
    """Times work on the host; the work is synchronous, so device time is host time."""

    separate_host = False
    cold_cache_bytes = 0

    def warm_up(self, launch: Callable[[], object]) -> None:
        """Run the work until nothing is compiled or allocated any more."""
        for _ in range(WARM_UP_RUNS):
            launch()

    def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
        """A replay of the work, or None and why there is none."""
        return None, "no CUDA graphs on this device"

    def visit(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        """Seconds of each counted run: on the device, and of the host alone."""
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        return [(seconds, seconds)]


class GPUClock(Clock):
    """What the clocks of a GPU share: warm-up, and the recording of work into a CUDA graph."""

    separate_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, launch: Callable[[], object]) -> None:
        with torch.cuda.device(self.device):
            super().warm_up(launch)
            torch.cuda.synchronize()

    def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
        with torch.cuda.device(self.device):
            try:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    launch()
                torch.cuda.current_stream().wait_stream(side)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    launch()
                graph.replay()
                torch.cuda.synchronize()
            except Exception as error:
                torch.cuda.synchronize()
                return None, f"not capturable: {type(error).__name__}: {error}".splitlines()[0]
        return graph.replay, ""


class CudaClock(GPUClock):
    """Times work with CUDA events, from an idle device and a cold L2 cache."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.cold_cache_bytes = max(4 * cache, 2**28)
        self._eviction = torch.empty(self.cold_cache_bytes, dtype=torch.int8, device=device)
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS_PER_VISIT)
        ]

    def visit(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        hosts = []
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for start, end in self._events:
                self._eviction.zero_()
                start.record()
                before = time.perf_counter()
                run()
                hosts.append(time.perf_counter() - before)
                end.record()
            torch.cuda.synchronize()
        devices = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        return list(zip(devices, hosts, strict=True))[1:]


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
