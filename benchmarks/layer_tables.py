"""A record of layers as the tables of the documentation. Numbers come from the record alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fusedlayers.bench.contenders import AUTO, COMPILED, EAGER
from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import DIRECTIONS, NONE, Table, asked_for, cells, shape_of, timed_rows

HOW_TO_TIME = ": run the benchmark with --time"


def markdown(record: Record) -> str:
    """A section of the documentation: where and with what it was measured, then one table per grid and direction.

    Raises:
        ValueError: the record holds no times.
    """
    found = tables(record)
    return "\n".join([conditions(record), "", *(table.markdown() for table in found)])


def conditions(record: Record) -> str:
    """One paragraph: device, versions, date, commit, and what the cells mean."""
    device, versions = record["device"], record["versions"]
    parts = [device["name"], f"torch {versions['torch']}"]
    parts += [f"Triton {versions['triton']}"] if device["kind"] == "cuda" and versions["triton"] else []
    parts += [", ".join(dict.fromkeys(row["dtype"] for row in record["rows"])), record["started"][:10]]
    if record["commit"]:
        parts.append(f"commit {record['commit'][:10]}" + (" with local changes" if record["dirty"] else ""))
    parts += other_commits(timed_rows(record))
    cold = "L2 cache cold, " if record["method"]["cold_cache_bytes"] else ""
    return (
        f"Measured on {', '.join(parts)}. Medians in µs, *launched / replayed in a CUDA graph*, {cold}random data, "
        "contenders interleaved; `*` marks a launched time that shows the host rather than the device. "
        "*Speed-up* is the best of torch's over fusedlayers in auto mode: above 1 fusedlayers "
        "is faster. *Of floor* is the time that arithmetic and memory traffic take at peak rates as they were "
        "measured, over ours. Memory in MiB, *eager / compile / fusedlayers*: saved for backward without parameters, "
        "and allocated at most."
    )


def tables(record: Record) -> list[Table]:
    """One table per grid, dtype and direction, rows in the record's order."""
    rows = rows_with_times(record, HOW_TO_TIME)
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["title"], row["dtype"], row["direction"]), []).append(row)
    return [_table(*group, found) for group, found in groups.items()]


def rows_with_times(record: Record, hint: str = "") -> list[Record]:
    """The rows with at least one time, for what is nothing without one; ``hint``: how to get some.

    Raises:
        ValueError: the record holds no times.
    """
    rows = timed_rows(record)
    if not rows:
        raise ValueError(f"the record holds no times{hint}")
    return rows


def other_commits(rows: Iterable[Record]) -> list[str]:
    """How many of these rows were measured at each commit that is not the record's."""
    commits = Counter(row["commit"] for row in rows if row.get("commit"))
    return [f"{count} of its rows at {commit[:10]}" for commit, count in commits.items()]


def _table(title: str, dtype: str, direction: str, rows: list[Record]) -> Table:
    more = asked_for(rows)
    columns = [rows[0]["meaning"], EAGER, COMPILED, *more, "fusedlayers", "path", "forced kernels"]
    columns += ["speed-up", "of floor"] + (["saved", "peak"] if direction == "forward_backward" else [])
    lines = []
    for row in rows:
        line = [shape_of(row), *cells(row, more)]
        if direction == "forward_backward":
            line += [_memory(row, "saved_bytes"), _memory(row, "peak_bytes")]
        lines.append(tuple(line))
    return Table(f"{title}: {DIRECTIONS[direction]}, {dtype}", tuple(columns), tuple(lines))


def _memory(row: Record, key: str) -> str:
    sizes = [(row["contenders"].get(name) or {}).get(key) for name in (EAGER, COMPILED, AUTO)]
    return " / ".join(NONE if size is None else _mebibytes(size) for size in sizes)


def _mebibytes(size: int) -> str:
    mebibytes = size / 2**20
    return f"{mebibytes:.0f}" if mebibytes >= 10 else f"{mebibytes:.1f}"
