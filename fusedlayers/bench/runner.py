"""One benchmark run: verify every row, and time those of operations that are right, and measure their memory."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from . import record as records
from . import tables
from .cases import DTYPES, Case, Draw, Grid, Options, Shape, shape_text
from .contenders import AUTO, FUSED, Contender, contender, our_paths, our_plan, why_untimed
from .memory import peak_bytes, saved_bytes
from .record import Record
from .timing import NotTimed, Timing, clock_for, measure
from .verification import Verification, verify
from .work import timed_work

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
    is timed. ``make`` makes a contender by its name, or says why it cannot run, and ``libraries`` are the distributions
    that contenders are from. ``shared`` and ``alone`` are entered around verification and around timing, where other
    processes use the device, too.
    """

    dtype: str
    device: torch.device
    init: str = "normal"
    seed: int = 0
    timed: bool = False
    directions: tuple[str, ...] = (FORWARD, FORWARD_BACKWARD)
    contenders: tuple[str, ...] = ()
    make: Callable[[str, Case, Options], Contender | NotTimed] = contender
    libraries: tuple[str, ...] = ()
    seconds: float = 1.0
    budget: float | None = None
    commit: str | None = None
    shared: Callable[[], AbstractContextManager[object]] = nullcontext
    alone: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def draw(self) -> Draw:
        """How inputs are drawn."""
        return Draw(DTYPES[self.dtype], self.device, self.init, self.seed)

    def shapes(self, grid: Grid) -> tuple[Shape, ...]:
        """The shapes of a grid for this device."""
        return grid.shapes if self.device.type == "cuda" else grid.shapes_without_gpu


def run(
    rows: list[Row], settings: Settings, arguments: list[str], path: Path, say: Callable[[str], None] = print
) -> tuple[Record, bool]:
    """(the record, whether everything verified is right). The record is on disk at ``path`` after every row."""
    method: dict[str, object] = {
        "seconds_per_row": settings.seconds,
        "cold_cache_bytes": clock_for(settings.device).cold_cache_bytes,
        "init": settings.init,
        "seed": settings.seed,
    }
    record = records.new_record(arguments, settings.device, method, settings.commit, settings.libraries)
    for entry in measured(rows, settings, say):
        record["rows"].append(entry)
        records.write(record, path)
    records.finish(record, path)
    return record, all(map(is_right, record["rows"]))


def is_right(entry: Record) -> bool:
    """Whether nothing that was verified of a record's row is red."""
    return all(each["status"] != "red" for each in entry["verification"])


def measured(rows: list[Row], settings: Settings, say: Callable[[str], None] = print) -> Iterator[Record]:
    """The record's entries of the rows, each verified and, if that is asked for, timed.

    No row of an operation is timed unless all of them are right; those of one operation follow one another.
    """
    started = time.perf_counter()
    # One operation after the other, so that a run that is cut off has the times of the first ones.
    for _, group in groupby(rows, lambda row: row.case.name):
        verified = [(row, _verify(row, settings, say)) for row in group]
        timing = settings.timed and not any(each.red for _, found in verified for each in found)
        directions = settings.directions if timing else (FORWARD_BACKWARD,)
        for row, found in verified:
            for direction in directions if row.case.backward else (FORWARD,):
                entry = _row_entry(row, settings, direction, found)
                if timing:
                    entry |= _timed(row, settings, direction, entry, started, say)
                yield entry


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
        return {"contenders": {name: records.untimed_entry(reason) for name in settings.contenders}}
    say(f"time   {row.label} {direction}")
    return {"contenders": _time(row, settings, direction, entry), "clocks": records.clocks(settings.device)}


def _time(row: Row, settings: Settings, direction: str, entry: Record) -> Record:
    """The entries of all contenders, timed and measured on the same fresh inputs."""
    # A row's compiled code is of no use to the next row, and many rows would exceed the compiler's limit of variants.
    torch._dynamo.reset()
    clock = clock_for(settings.device)
    draw, backward = settings.draw.another(2), direction == FORWARD_BACKWARD
    work = timed_work(row.case, row.options, row.shape, draw, backward, clock.cold_cache_bytes)
    paths = our_paths(row.case, row.options, work)
    unsupported = our_plan(row.case, row.options, work, backend="triton").unsupported
    timings: dict[str, Timing | NotTimed] = {}
    entrants: dict[str, Contender] = {}
    for name in settings.contenders:
        if name == FUSED and {*paths[AUTO]} == {*paths[FUSED]}:
            timings[name] = NotTimed("auto mode chose the same kernels", "same as auto")
        elif name == FUSED and (reason := unsupported or why_untimed(settings.device)):
            timings[name] = NotTimed(reason)
        elif isinstance(made := settings.make(name, row.case, row.options), NotTimed):
            timings[name] = made
        else:
            entrants[name] = made
    timings |= measure([*entrants.values()], work, seconds=settings.seconds, clock=clock, alone=settings.alone)
    entries: Record = {}
    for name in settings.contenders:
        timing, ways = timings[name], paths.get(name, (None, None))
        if isinstance(timing, NotTimed):
            entries[name] = records.untimed_entry(timing.reason, ways, timing.status)
            continue
        saved = saved_bytes(entrants[name], work, row.case.parameters) if work.backward else None
        peak = peak_bytes(entrants[name], work)
        entries[name] = records.contender_entry(timing, ways, entry["flops"], entry["floor_seconds"], saved, peak)
    return entries


def report(rows: list[Row], settings: Settings, words: list[str], path: Path) -> int:
    """Run the rows and print their times; the exit status: 1 if a verification is red, or nothing was timed."""
    if settings.device.type != "cuda":
        print("no GPU is used: verifying" + (" and timing" if settings.timed else "") + " the torch path on the CPU")
    try:
        found, right = run(rows, settings, words, path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nrecord: {path}")
    timed = tables.timed_rows(found)
    if not right:
        refused = ": its operation is not timed" if timed else ": nothing is timed" if settings.timed else ""
        print(f"verification is RED{refused}", file=sys.stderr)
        if not timed:
            return 1
    if not settings.timed:
        print("verification is green")
        return 0
    if not timed:
        entries = [(name, entry) for row in found["rows"] for name, entry in row["contenders"].items()]
        reasons = dict.fromkeys(f"{name}: {entry['reason']}" for name, entry in entries)
        print(f"error: nothing was timed: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    tables.screen(found).show()
    for line in tables.slower_than_torch(found):
        print(f"slower than torch: {line}")
    return 0 if right else 1
