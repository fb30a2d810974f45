"""Auto mode's decisions beside the committed times: what the paths that it takes now cost over the fastest ones.

    python -m benchmarks.replay               every operation, pass and card
    python -m benchmarks.replay --worst 20    and the decisions that cost the most

No GPU is asked: each row of the records is planned again for the card that it was measured on, and its time is that of
the contender which took the path. Eager torch is the alternative, and kernels wherever they were timed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fusedlayers import planning
from fusedlayers.bench.cases import CASES, DTYPES, Options
from fusedlayers.bench.contenders import AUTO, EAGER, FUSED
from fusedlayers.bench.record import Record
from fusedlayers.bench.runner import FORWARD, shape_text
from fusedlayers.bench.tables import DIRECTIONS, KINDS, PATHS, Table, median
from fusedlayers.planning import CARDS

RESULTS = Path(__file__).parent / "results"
# A decision that costs more is a wrong one: so much lies within the noise of two measurements.
WRONG = 1.03


class Decision(NamedTuple):
    """A row of a record in one kind of time, the path that auto mode takes now, and the times of all known paths."""

    card: str
    row: Record
    kind: str
    path: str
    seconds: dict[str, float]

    @property
    def regret(self) -> float:
        """The time of the path over that of the fastest one."""
        return self.seconds[self.path] / min(self.seconds.values())

    def line(self) -> str:
        row = self.row
        times = ", ".join(f"{path} {1e6 * seconds:,.1f} µs" for path, seconds in self.seconds.items())
        where = f"{self.card} {row['grid']} {shape_text(row['shape'])} {DIRECTIONS[row['direction']]}, {self.kind}"
        return f"{self.regret:.2f} {where}: {self.path} ({times})"


def decisions(record: Record) -> Iterator[Decision]:
    """Every row of a record that can be decided again: of a known card and a case, and timed on the path taken now.

    Without rows that recompute: their path is a wish for memory, no question of speed.
    """
    card = next((name for name in CARDS if name in record["device"]["name"].split()), None)
    if card is None:
        return
    for row in record["rows"]:
        if row["case"] not in CASES or row["recompute"] is True:
            continue
        problem = _problem(row)
        for kind in KINDS:
            times = _times(row, kind)
            path = planning.plan(replace(problem, captured=kind == "replayed"), CARDS[card]).path
            if path in times and "torch" in times:
                yield Decision(card, row, kind, path, times)


def _problem(row: Record) -> Any:
    case = CASES[row["case"]]
    options = Options(**{field.name: row[field.name] for field in fields(Options)})
    operands = case.operands(tuple(row["shape"]), options)
    training = row["direction"] != FORWARD
    return case.problem({name: each.blank(DTYPES[row["dtype"]], training) for name, each in operands.items()}, options)


def _times(row: Record, kind: str) -> dict[str, float]:
    """Seconds of each path; of one that two contenders took, auto mode's."""
    found: dict[str, float] = {}
    if (seconds := median(row, EAGER, kind)) is not None:
        found["torch"] = seconds
    for name in (FUSED, AUTO):
        entry = row["contenders"].get(name, {})
        if entry.get(kind) is not None:
            found[entry[PATHS[kind]]] = entry[kind]["median"]
    return found


def committed() -> list[Decision]:
    """The decisions of all records of layers that were measured with the usual release of Triton."""
    found: list[Decision] = []
    for path in sorted(RESULTS.rglob("*.json")):
        if path.parent.name not in ("drawn", "host", "steps", "sweeps") and "-triton-" not in path.name:
            found += decisions(json.loads(path.read_text()))
    return found


def mean_regret(found: list[Decision]) -> float:
    """Its geometric mean."""
    return math.exp(statistics.fmean(math.log(each.regret) for each in found))


def table(found: list[Decision]) -> Table:
    """A line for each card, operation, direction and kind of time, and one for all."""
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for each in found:
        name = each.card, each.row["case"], DIRECTIONS[each.row["direction"]], each.kind
        groups.setdefault(name, []).append(each)
    lines = [
        (*name, str(len(rows)), f"{mean_regret(rows):.3f}", str(sum(row.regret > WRONG for row in rows)),
         f"{max(row.regret for row in rows):.2f}")
        for name, rows in (*sorted(groups.items()), (("all", "", "", ""), found))
    ]  # fmt: skip
    columns = ("card", "operation", "pass", "time", "rows", "mean regret", f"above {WRONG}", "most")
    return Table("Auto mode's time over that of the fastest path", columns, tuple(lines))


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__.split("\n")[0])
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N decisions that cost the most")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    chosen = build_parser().parse_args(arguments)
    found = committed()
    print(table(found).plain())
    for each in sorted(found, key=lambda each: -each.regret)[: chosen.worst]:
        print(each.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
