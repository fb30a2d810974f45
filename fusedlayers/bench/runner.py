"""One benchmark run: verify every row, and time those of operations that are right, and measure their memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from . import record as records
from .cases import DTYPES, Case, Grid, Options, Shape
from .contenders import AUTO, DISTRIBUTIONS, FUSED, Contender, contender, our_plan
from .exactness import random_work, rotating_work
from .memory import peak_bytes, saved_bytes
from .record import Record
from .timing import NotTimed, clock_for, measure
from .verification import Verification, verify

FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"


@dataclass(frozen=True)
class Row:
    """One shape of one grid."""

    case: Case
    grid: Grid
    options: Options
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.grid.name} {shape_text(self.shape)}"


@dataclass(frozen=True)
class Settings:
    """How a run measures.

    ``seconds`` is spent per row and direction, beside warm-up and compilation; after ``budget`` seconds no further row
    is timed. ``shared`` and ``alone`` are entered around verification and around timing, where other processes use the
    device, too.
    """

    dtype: str
    device: torch.device
    init: str = "normal"
    seed: int = 0
    timed: bool = False
    directions: tuple[str, ...] = (FORWARD, FORWARD_BACKWARD)
    contenders: tuple[str, ...] = ()
    seconds: float = 1.0
    budget: float | None = None
    commit: str | None = None
    shared: Callable[[], AbstractContextManager[object]] = nullcontext
    alone: Callable[[], AbstractContextManager[object]] = nullcontext


def shape_text(shape: Shape | list[int]) -> str:
    """``65536×256×1024``."""
    return "×".join(map(str, shape))


def run(
    rows: list[Row], settings: Settings, arguments: list[str], path: Path, say: Callable[[str], None] = print
) -> tuple[Record, bool]:
    """(the record, whether everything verified is right). The record is on disk at ``path`` after every row.

    No row of an operation is timed unless all of them are right; those of one operation follow one another.
    """
    started = time.perf_counter()
    clock = clock_for(settings.device)
    method: dict[str, object] = {
        "seconds_per_row": settings.seconds,
        "cold_cache_bytes": clock.cold_cache_bytes,
        "init": settings.init,
        "seed": settings.seed,
    }
    libraries = [DISTRIBUTIONS[name] for name in settings.contenders if name in DISTRIBUTIONS]
    record = records.new_record(arguments, settings.device, method, settings.commit, libraries)
    right = True
    # One operation after the other, so that a run that is cut off has the times of the first ones.
    for _, group in groupby(rows, lambda row: row.case.name):
        verified = [(row, _verify(row, settings, say)) for row in group]
        red = any(verification.red for _, found in verified for verification in found)
        right = right and not red
        timing = settings.timed and not red
        directions = settings.directions if timing else (FORWARD_BACKWARD,)
        for row, found in verified:
            for direction in directions if row.case.backward else (FORWARD,):
                entry = _row_entry(row, settings, direction, found)
                if timing:
                    entry |= _timed(row, settings, direction, entry, started, say)
                record["rows"].append(entry)
                records.write(record, path)
    records.finish(record)
    records.write(record, path)
    return record, right


def _verify(row: Row, settings: Settings, say: Callable[[str], None]) -> list[Verification]:
    with settings.shared(), warnings.catch_warnings():
        # torch says so once about its own backward thread, and goes on.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        found = verify(
            row.case, row.options, row.shape,
            init=settings.init, dtype=DTYPES[settings.dtype], device=settings.device, seed=settings.seed,
        )  # fmt: skip
    say(f"verify {row.label} {settings.dtype}")
    for verification in found:
        say(f"  {verification.summary()}")
    return found


def _row_entry(row: Row, settings: Settings, direction: str, found: list[Verification]) -> Record:
    backward = direction == FORWARD_BACKWARD
    flops = row.case.flops(row.shape, row.options, backward)
    moved = row.case.moved_bytes(row.shape, row.options, DTYPES[settings.dtype], backward)
    return {
        "case": row.case.name,
        "grid": row.grid.name,
        "title": row.grid.title,
        "letters": list(row.case.letters),
        "meaning": row.case.meaning,
        "shape": list(row.shape),
        "dtype": settings.dtype,
        **asdict(row.options),
        "direction": direction,
        "flops": flops,
        "bytes": moved,
        "floor_seconds": records.floor_seconds(flops, moved, settings.device, DTYPES[settings.dtype]),
        "verification": [verification.as_json() for verification in found],
        "clocks": None,
        "contenders": {},
    }


def _timed(
    row: Row, settings: Settings, direction: str, entry: Record, started: float, say: Callable[[str], None]
) -> Record:
    """What timing adds to an entry: no times once the budget is spent."""
    if settings.budget is not None and time.perf_counter() - started > settings.budget:
        reason = f"the budget of {settings.budget:g} s was spent"
        say(f"skip   {row.label} {direction}: {reason}")
        untimed = {name: records.untimed_entry("not timed", reason, (None, None)) for name in settings.contenders}
        return {"contenders": untimed}
    say(f"time   {row.label} {direction}")
    return {"contenders": _time(row, settings, direction, entry), "clocks": records.clocks(settings.device)}


def _time(row: Row, settings: Settings, direction: str, entry: Record) -> Record:
    """The entries of all contenders, timed and measured on the same fresh inputs."""
    # A row's compiled code is of no use to the next row, and many rows would exceed the compiler's limit of variants.
    torch._dynamo.reset()
    clock = clock_for(settings.device)
    drawn: dict[str, Any] = {
        "init": settings.init, "dtype": DTYPES[settings.dtype], "device": settings.device, "seed": settings.seed + 2,
        "backward": direction == FORWARD_BACKWARD,
    }  # fmt: skip
    if row.case.rotating:
        work = rotating_work(row.case, row.options, row.shape, least_bytes=clock.cold_cache_bytes, **drawn)
    else:
        work = random_work(row.case, row.options, row.shape, **drawn)
    plan = our_plan(row.case, row.options, work)
    replayed_path = our_plan(row.case, row.options, work, captured=True).path
    forced_path = our_plan(row.case, row.options, work, backend="triton").path
    paths = {AUTO: (plan.path, replayed_path), FUSED: (forced_path, forced_path)}
    entries: Record = {}
    entrants: list[Contender] = []
    for name in settings.contenders:
        if name == FUSED and plan.path == replayed_path == forced_path:
            entries[name] = records.untimed_entry("same as auto", "auto mode chose the same kernels", paths[FUSED])
        elif name == FUSED and plan.unsupported is not None:
            entries[name] = records.untimed_entry("not timed", plan.unsupported, paths[FUSED])
        elif name == FUSED and settings.device.type != "cuda":
            entries[name] = records.untimed_entry("not timed", "the interpreter's time means nothing", paths[FUSED])
        else:
            try:
                entrants.append(contender(name, row.case, row.options))
            except ImportError as error:
                entries[name] = records.untimed_entry(
                    "not timed", f"not usable here: {error}".splitlines()[0], (None, None)
                )
            except KeyError:
                reason = f"{row.case.name} has no such contender"
                entries[name] = records.untimed_entry("not timed", reason, (None, None))
    timings = measure(entrants, work, seconds=settings.seconds, clock=clock, alone=settings.alone)
    for entrant in entrants:
        timing = timings[entrant.name]
        ways = paths.get(entrant.name, (None, None))
        if isinstance(timing, NotTimed):
            entries[entrant.name] = records.untimed_entry("not timed", timing.reason, ways)
            continue
        saved = saved_bytes(entrant, work, row.case.parameters) if work.backward else None
        peak = peak_bytes(entrant, work)
        entries[entrant.name] = records.contender_entry(
            timing, ways, entry["flops"], entry["floor_seconds"], saved, peak
        )
    return {name: entries[name] for name in settings.contenders}
