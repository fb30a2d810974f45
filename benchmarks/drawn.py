"""Auto mode and kernels beside the best of torch at sizes that nobody chose: each operation at random ones of a seed.

    python -m benchmarks.drawn                     60 sizes of every operation
    python -m benchmarks.drawn --families ffn,maxsim --sizes 20 --seed 7
    python -m benchmarks.drawn --processes 12      which compile side by side

A size lies between the least and the greatest of its operation's published grids, on a logarithmic scale, and takes no
more arithmetic than the greatest of them. Each is verified, and timed if it is right, as by the other benchmarks.
Kernels are timed wherever they can run, so that a size that auto mode leaves to torch wrongly is seen, too.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, positive, record_path, several
from fusedlayers.bench.cases import CASES, Case, Shape
from fusedlayers.bench.contenders import AUTO, COMPILED, EAGER, FUSED, contender
from fusedlayers.bench.record import Record
from fusedlayers.bench.runner import Row, Settings, is_right
from fusedlayers.bench.tables import (
    DIRECTIONS,
    ENOUGH,
    KINDS,
    NONE,
    PATHS,
    Table,
    apart,
    best_of_torch,
    median,
    shape_of,
    speed_up,
)
from fusedlayers.bench.work import random_work
from fusedlayers.functional.switches import switched

from . import side_by_side
from .endings import answered, chosen_gpu, measured_alone

FAMILIES = tuple(name for name, case in CASES.items() if case.grids)
# From here on a size is a multiple of 8, every other one of 64: models have such.
_FIRST_EVEN, _STEPS = 64, (8, 64)


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--families", type=lambda text: several(text, FAMILIES), default=FAMILIES, metavar="NAME,…",
        help=f"of {','.join(FAMILIES)}; default: all",
    )  # fmt: skip
    parser.add_argument("--sizes", type=int, default=60, help="how many of each operation (default: 60)")
    parser.add_argument("--seconds", type=positive, default=0.15, help="timing per size and direction (default: 0.15)")
    parser.add_argument("--processes", type=int, default=1, help="that compile side by side (default: 1)")
    add_record_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status: 1 if a result is wrong or nothing can be measured."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    for name in ("sizes", "processes"):
        if getattr(chosen, name) < 1:
            raise ValueError(f"argument --{name}: {getattr(chosen, name)}: expected 1 or more")
    device, dtype = chosen_gpu(chosen, "auto mode is timed beside torch"), chosen.dtype or "bf16"
    path = record_path(chosen.output, "drawn", dtype, device)
    settings = Settings(
        dtype, device, seed=chosen.seed, timed=True, contenders=(EAGER, COMPILED, AUTO, FUSED), seconds=chosen.seconds,
    )  # fmt: skip
    method: dict[str, object] = {
        "seconds_per_row": chosen.seconds, "seed": chosen.seed, "sizes": chosen.sizes, "processes": chosen.processes,
    }  # fmt: skip
    record = records.new_record(words, device, method, chosen.commit)
    # One of each operation in turn, so that a budget leaves as many of all.
    jobs = [(family, number) for number in range(chosen.sizes) for family in chosen.families]
    until = None if chosen.budget is None else time.time() + chosen.budget
    measure = partial(_measured, settings, until)
    found: dict[tuple[str, int], list[Record]] = {}
    right = True
    for job, (rows, green, said) in side_by_side.measured(measure, jobs, chosen.processes):
        right &= green
        print(said, file=sys.stdout if green else sys.stderr)
        found[job] = rows
        # In the order of the operations, whichever is done first.
        record["rows"] = [row for each in sorted(found, key=_place) for row in found[each]]
        records.write(record, path)
    records.finish(record, path)
    print(f"record: {path}")
    table(record).show()
    for line in slower_than_torch(record):
        print(f"slower than torch: {line}")
    for line in left_to_torch(record):
        print(f"left to torch: {line}")
    return 0 if right else 1


def drawn(case: Case, sizes: int, seed: int) -> Iterator[Row]:
    """Random rows of a case, one of each published grid in turn."""
    drawing = random.Random(f"{case.name} {seed}")
    for number in range(sizes):
        grid = case.grids[number % len(case.grids)]
        most = max(case.forward_flops(shape, grid.options) for shape in grid.shapes)
        shape = _shape(case, drawing)
        while case.forward_flops(shape, grid.options) > most:
            shape = _shape(case, drawing)
        yield Row(case, grid, grid.options, shape)


def _shape(case: Case, drawing: random.Random) -> Shape:
    """A size for each letter."""
    shape = []
    for published in zip(*(shape for grid in case.grids for shape in grid.shapes), strict=True):
        least, greatest = min(published), max(published)
        size = round(math.exp(drawing.uniform(math.log(least), math.log(greatest))))
        step = drawing.choice(_STEPS) if size >= _FIRST_EVEN else 1
        shape.append(max(least, size // step * step))
    return tuple(shape)


def _place(job: tuple[str, int]) -> tuple[int, int]:
    return FAMILIES.index(job[0]), job[1]


def _measured(settings: Settings, until: float | None, family: str, number: int) -> tuple[list[Record], bool, str]:
    """What the record says about a row, forward and backward, whether nothing is wrong, and what was done in a line."""
    *_, row = drawn(CASES[family], number + 1, settings.seed)
    if until is not None and time.time() > until:
        return [], True, f"skip   {row.label}: the budget was spent"
    turns = side_by_side.turns()
    if turns is not None:
        settings = replace(settings, shared=turns.shared, alone=turns.alone)
        _compile(row, settings)
    entries = measured_alone(row, settings)
    if not entries:
        return [], True, f"skip   {row.label}: memory does not suffice"
    if not all(map(is_right, entries)):
        return [], False, f"RED    {row.label}: {'; '.join(map(str, entries[0]['verification']))}"
    return [_short(entry) for entry in entries], True, f"timed  {row.label}"


def _compile(row: Row, settings: Settings) -> None:
    """What verification will run, so that nobody waits for a compiler while this process has a share of the GPU."""
    for backward in (False, True)[: 1 + row.case.backward]:
        for name in (AUTO, FUSED):
            ours = contender(name, row.case, row.options)
            # Verification will say what failed, a lack of memory too.
            with switched(ours.switches), suppress(Exception):
                random_work(row.case, row.options, row.shape, settings.draw, backward).run(ours.call)


def _short(row: Record) -> Record:
    """A row with what the table says: 60 sizes of ten operations would fill megabytes otherwise."""
    short = {"case": row["case"], "grid": row["grid"], "shape": shape_of(row), "direction": row["direction"]}
    for kind in KINDS:
        ratio, ours = speed_up(row, kind), median(row, AUTO, kind)
        if ratio is not None and ours is not None:
            short[kind] = {
                "path": row["contenders"][AUTO][PATHS[kind]], "best": best_of_torch(row, kind),
                "microseconds": round(1e6 * ours, 2), "speed_up": round(ratio, 4), "beyond_noise": apart(row, kind),
                "kernels": _kernels(row, kind),
            }  # fmt: skip
    return short


def _kernels(row: Record, kind: str) -> Record | None:
    """What kernels take where auto mode does not run them; None where it does, or where they cannot run."""
    auto, forced = row["contenders"][AUTO], row["contenders"].get(FUSED)
    if forced is None or forced.get(kind) is None or auto[PATHS[kind]] == forced[PATHS[kind]]:
        return None
    seconds, ours = forced[kind]["median"], auto[kind]
    return {
        "path": forced[PATHS[kind]], "microseconds": round(1e6 * seconds, 2),
        "speed_up": round(ours["median"] / seconds, 4),
        "beyond_noise": ours["first_quartile"] > forced[kind]["third_quartile"],
    }  # fmt: skip


def _regret(found: Record) -> float:
    """Auto mode's time over that of the best of auto mode, kernels and torch."""
    return max(1.0, 1 / found["speed_up"], (found.get("kernels") or {"speed_up": 1.0})["speed_up"])


def _left_to_torch(found: Record) -> bool:
    """Whether torch runs although kernels are faster by more than the noise."""
    kernels: Record = found.get("kernels") or {"beyond_noise": False}
    return found["path"] == "torch" and kernels["beyond_noise"] and kernels["speed_up"] > 1 / ENOUGH


def table(record: Record) -> Table:
    """A line for each operation, direction and kind of time."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for row in record["rows"]:
        for kind in KINDS:
            if kind in row:
                groups.setdefault((row["case"], row["direction"], kind), []).append(row[kind])
    lines = []
    for (name, direction, kind), rows in groups.items():
        ratios = [row["speed_up"] for row in rows]
        kernels = sum(row["path"] != "torch" for row in rows)
        slower = sum(row["speed_up"] < ENOUGH and row["beyond_noise"] for row in rows)
        line = [name, DIRECTIONS[direction], kind, str(len(rows)), str(kernels), f"{statistics.median(ratios):.2f}"]
        line += [f"{max(ratios):.2f}", f"{min(ratios):.2f}", str(slower)]
        # Records of earlier versions know no times of kernels that auto mode did not choose.
        if all("kernels" in row for row in rows):
            regrets = [_regret(row) for row in rows]
            line += [str(sum(map(_left_to_torch, rows))), f"{statistics.fmean(regrets):.2f}", f"{max(regrets):.2f}"]
        else:
            line += [NONE] * 3
        lines.append(tuple(line))
    columns = ("operation", "pass", "time", "sizes", "in kernels", "median speed-up", "best", "least", "slower",
               "left to torch", "mean regret", "most")  # fmt: skip
    return Table("Random sizes: the best of torch over auto mode", columns, tuple(lines))


def _timed(record: Record) -> Iterator[tuple[str, Record]]:
    """What is measured of each size, direction and kind of time, behind its name."""
    for row in record["rows"]:
        for kind in KINDS:
            if kind in row:
                yield f"{row['grid']} {row['shape']} {row['direction']}, {kind}", row[kind]


def slower_than_torch(record: Record) -> list[str]:
    """One line for every size at which auto mode is slower than torch by more than the noise."""
    return [
        f"{name}: {found['speed_up']:.2f} of {found['best']}'s speed ({found['path']} path)"
        for name, found in _timed(record)
        if found["speed_up"] < ENOUGH and found["beyond_noise"]
    ]


def left_to_torch(record: Record) -> list[str]:
    """One line for every size that auto mode leaves to torch though kernels are faster by more than the noise."""
    return [
        f"{name}: auto {found['microseconds']:.0f} µs, kernels {found['kernels']['microseconds']:.0f} µs "
        f"({found['kernels']['path']} path)"
        for name, found in _timed(record)
        if _left_to_torch(found)
    ]


def markdown(record: Record) -> str:
    """The section of the documentation: the table, and every size that is slower."""
    versions, method = record["versions"], record["method"]
    caption = (
        f"Measured on {record['device']['name']}, torch {versions['torch']}, Triton {versions['triton']}, bf16, "
        f"{record['started'][:10]}, commit {str(record['commit'])[:10]}, sizes drawn with the seed {method['seed']}. "
        "*Speed-up* is the best of eager torch and `torch.compile` over auto mode, launched or replayed in a CUDA "
        f"graph; *slower*: how many sizes are below {ENOUGH} by more than the noise."
    )
    if (processes := method.get("processes", 1)) > 1:
        caption += f" {processes} processes compiled while one of them had the GPU for itself: the host is slowed down."
    caption += (
        " *Left to torch*: how many sizes torch runs although kernels are faster by more than the noise; *regret*: "
        "auto mode's time over the least of auto mode's, kernels' and torch's."
    )
    parts = [caption, table(record).markdown()]
    for summary, lines in (
        ("Every size that is slower by more than the noise", slower_than_torch(record)),
        ("Every size that is left to torch though kernels are faster", left_to_torch(record)),
    ):
        if lines:
            listed = "\n".join(f"- {line}" for line in lines)
            parts.append(f"<details>\n<summary>{summary}</summary>\n\n{listed}\n\n</details>")
    return "\n\n".join(part.strip() for part in parts)


if __name__ == "__main__":
    sys.exit(main())
