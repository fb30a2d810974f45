"""What the committed results say of paths: seconds of each, launched and replayed, by planning problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fusedlayers.bench.cases import ALL, DTYPES, Options
from fusedlayers.bench.contenders import AUTO, COMPILED, EAGER, FUSED
from fusedlayers.bench.runner import FORWARD
from fusedlayers.bench.tables import KINDS, PATHS, median
from fusedlayers.planning import CARDS, Call
from fusedlayers.planning.record import LAUNCHED, REPLAYED, TORCH

RESULTS = Path(__file__).parent / "results"
# What is no call of one operation, or was not measured with the usual release of Triton.
_OTHERS = ("autotune", "float8", "recompute", "steps", "sweeps")
# Sizes that were drawn are timed while other processes compile: their host is slower than a user's, so that launched
# times say nothing.
DRAWN = "drawn"
# Layers of a loop, as users have them, which wait for the host as little as theirs.
HOST = "host"

Seconds = dict[str, float]


class Source(NamedTuple):
    """A problem as it was measured: seconds by path, and the folder of results that it is from."""

    problem: Any
    launched: Seconds
    replayed: Seconds
    folder: str


def sources(card: str) -> list[Source]:
    """Everything that was measured on a card, in the order of the files."""
    found = []
    for path in sorted(RESULTS.rglob("*.json")):
        if path.parent.name in _OTHERS or "-triton-" in path.name:
            continue
        record = json.loads(path.read_text())
        if card in record["device"]["name"].split():
            read = {DRAWN: _drawn, HOST: _chained}.get(path.parent.name, _timed)
            for problem, *kinds in read(record["rows"]):
                launched, replayed = (
                    {problem.recorded(name, CARDS[card]): time for name, time in seconds.items()} for seconds in kinds
                )
                if path.parent.name == DRAWN:
                    launched = {}
                found.append(Source(problem, launched, replayed, path.parent.name))
    return found


def _timed(rows: list[dict[str, Any]]) -> Iterator[tuple[Call, Seconds, Seconds]]:
    for row in rows:
        # A path that recomputes is a wish for memory, no question of speed.
        if row["case"] in ALL and row["recompute"] is not True:
            yield problem_of(row), _times(row, LAUNCHED), _times(row, REPLAYED)


def _chained(rows: list[dict[str, Any]]) -> Iterator[tuple[Call, Seconds, Seconds]]:
    for row in rows:
        if row["grid"].endswith("ffn") and not row["autocast"]:
            torch, kernels = row["contenders"]["torch"], row["contenders"]["kernels"]
            launched, replayed = (
                {TORCH: torch[kind]["median"], kernels["path"]: kernels[kind]["median"]} for kind in KINDS
            )
            yield problem_of({**row, "case": "ffn"}), launched, replayed


def _drawn(rows: list[dict[str, Any]]) -> Iterator[tuple[Call, Seconds, Seconds]]:
    for row in rows:
        case = ALL[row["case"]]
        options = next(grid.options for grid in case.grids if grid.name == row["grid"])
        given = {each.name: getattr(options, each.name) for each in fields(Options)}
        shape = [int(size) for size in row["shape"].split("×")]
        found = [_drawn_times(row[kind]) if kind in row else {} for kind in KINDS]
        yield problem_of({**given, **row, "shape": shape, "dtype": "bf16"}), found[0], found[1]


def problem_of(row: dict[str, Any]) -> Any:
    """What the planner is asked for a row, launched one by one."""
    case = ALL[row["case"]]
    options = Options(**{field.name: row[field.name] for field in fields(Options)})
    operands = case.operands(tuple(row["shape"]), options)
    training = row["direction"] != FORWARD
    return case.problem({name: each.blank(DTYPES[row["dtype"]], training) for name, each in operands.items()}, options)


def _times(row: dict[str, Any], kind: str) -> Seconds:
    """Of a path that two contenders took, auto mode's."""
    eager = median(row, EAGER, kind)
    found = {} if eager is None else {TORCH: eager}
    for name in (FUSED, AUTO):
        entry = row["contenders"].get(name, {})
        if entry.get(kind) is not None:
            found[entry[PATHS[kind]]] = entry[kind]["median"]
    return found


def _drawn_times(found: dict[str, Any]) -> Seconds:
    """Of a row that says how much faster the best of torch was: eager torch is at least as slow as that."""
    times = {found["path"]: 1e-6 * found["microseconds"]}
    if (kernels := found.get("kernels")) is not None:
        times[kernels["path"]] = 1e-6 * kernels["microseconds"]
    assert found["best"] in (EAGER, COMPILED)
    times.setdefault(TORCH, 1e-6 * found["microseconds"] * found["speed_up"])
    return times


__all__ = ["CARDS", "DRAWN", "HOST", "RESULTS", "Source", "problem_of", "sources"]
