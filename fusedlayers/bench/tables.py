"""A record as tables: short ones for the screen, and those of the documentation. Numbers come from the record alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .contenders import AUTO, COMPILED, EAGER, FUSED, ON_REQUEST, TORCH_CONTENDERS
from .record import Record

# Auto mode should not be slower than this share of the best of torch's times.
ENOUGH = 0.97
KINDS = ("launched", "replayed")
PATHS = {"launched": "path", "replayed": "replayed_path"}
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
NONE = "–"
HOW_TO_TIME = ": run the benchmark with --time"


@dataclass(frozen=True)
class Table:
    """Words in rows and columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _piped(self.columns), _piped(("---",) * len(self.columns))]
        return "\n".join([*lines, *map(_piped, self.rows)]) + "\n"

    def plain(self) -> str:
        """Columns aligned with spaces."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        aligned = [(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *("  ".join(words).rstrip() for words in aligned)])


def median(row: Record, name: str, kind: str) -> float | None:
    """The median time of a contender, launched or replayed, in seconds; None if it was not measured."""
    entry = row["contenders"].get(name)
    if entry is not None and entry["status"] == "same as auto":
        entry = row["contenders"].get(AUTO)
    if entry is None or entry.get(kind) is None:
        return None
    return float(entry[kind]["median"])


def best_of_torch(row: Record, kind: str) -> str | None:
    """The fastest of torch's contenders, None if none was measured."""
    timed = {name: time for name in TORCH_CONTENDERS if (time := median(row, name, kind)) is not None}
    return min(timed, key=lambda name: timed[name], default=None)


def speed_up(row: Record, kind: str, name: str = AUTO) -> float | None:
    """The best of torch's times over ours, of the same kind; above 1 we are faster."""
    ours, best = median(row, name, kind), best_of_torch(row, kind)
    theirs = None if best is None else median(row, best, kind)
    return theirs / ours if ours and theirs is not None else None


def timed_rows(record: Record) -> list[Record]:
    """The rows with at least one time."""
    return [row for row in record["rows"] if any(entry["status"] == "timed" for entry in row["contenders"].values())]


def rows_with_times(record: Record, hint: str = "") -> list[Record]:
    """The same, for what is nothing without one; ``hint``: how to get some.

    Raises:
        ValueError: the record holds no times.
    """
    rows = timed_rows(record)
    if not rows:
        raise ValueError(f"the record holds no times{hint}")
    return rows


def markdown(record: Record) -> str:
    """A section of the documentation: where and with what it was measured, then one table per grid and direction.

    Raises:
        ValueError: the record holds no times.
    """
    found = tables(record)
    return "\n".join([conditions(record), "", *(table.markdown() for table in found)])


def other_commits(rows: Iterable[Record]) -> list[str]:
    """How many of these rows were measured at each commit that is not the record's."""
    commits = Counter(row["commit"] for row in rows if row.get("commit"))
    return [f"{count} of its rows at {commit[:10]}" for commit, count in commits.items()]


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


def slower_than_torch(record: Record) -> list[str]:
    """One line for every row and kind of time in which auto mode is slower than torch by more than the noise."""
    lines = []
    for row in timed_rows(record):
        for kind in KINDS:
            ratio = speed_up(row, kind)
            if ratio is not None and ratio < ENOUGH and apart(row, kind):
                where = f"{row['grid']} {shape_of(row)} {DIRECTIONS[row['direction']]}, {kind}"
                lines.append(f"{where}: {ratio:.2f} of torch's speed ({row['contenders'][AUTO][PATHS[kind]]} path)")
    return lines


def apart(row: Record, kind: str) -> bool:
    """Whether our middle half of the times lies above that of the best of torch's: medians alone differ by chance."""
    ours, theirs = row["contenders"][AUTO][kind], row["contenders"][best_of_torch(row, kind)][kind]
    return float(ours["first_quartile"]) > float(theirs["third_quartile"])


def screen(record: Record) -> Table:
    """Everything in one narrow table for a terminal."""
    more = _asked_for(timed_rows(record))
    columns = ("grid", "shape", "pass", "eager", "compile", *more, "auto", "path", "fused", "speed-up", "of floor")
    rows = []
    for row in timed_rows(record):
        times = [_times(row, name) for name in (EAGER, COMPILED, *more, AUTO)]
        passes = "f" if row["direction"] == "forward" else "f+b"
        rows.append(
            (
                row["grid"],
                shape_of(row),
                passes,
                *times,
                _path(row),
                _forced(row),
                _ratios(row),
                _share(row),
            )
        )
    return Table("µs, launched / replayed (* host-bound); speed-up over the best of torch", columns, tuple(rows))


def _table(title: str, dtype: str, direction: str, rows: list[Record]) -> Table:
    more = _asked_for(rows)
    columns = [rows[0]["meaning"], "torch eager", "torch.compile", *more, "fusedlayers", "path", "forced kernels"]
    columns += ["speed-up", "of floor"] + (["saved", "peak"] if direction == "forward_backward" else [])
    lines = []
    for row in rows:
        line = [shape_of(row), *(_times(row, name) for name in (EAGER, COMPILED, *more, AUTO)), _path(row)]
        line += [_forced(row), _ratios(row), _share(row)]
        if direction == "forward_backward":
            line += [_memory(row, "saved_bytes"), _memory(row, "peak_bytes")]
        lines.append(tuple(line))
    return Table(f"{title}: {DIRECTIONS[direction]}, {dtype}", tuple(columns), tuple(lines))


def _asked_for(rows: list[Record]) -> list[str]:
    """The columns of those that were timed because somebody asked for them."""
    return [name for name in ON_REQUEST if any(name in row["contenders"] for row in rows)]


def shape_of(row: Record) -> str:
    """``65536×256×1024``."""
    return "×".join(map(str, row["shape"]))


def _times(row: Record, name: str) -> str:
    values = [median(row, name, kind) if name in row["contenders"] else None for kind in KINDS]
    if values[0] is None:
        return NONE
    mark = "*" if row["contenders"][name]["host_bound"] else ""
    return " / ".join([f"{values[0] * 1e6:.0f}{mark}", NONE if values[1] is None else f"{values[1] * 1e6:.0f}"])


def _forced(row: Record) -> str:
    entry = row["contenders"].get(FUSED)
    if entry is not None and entry["status"] == "same as auto":
        return "same"
    return _times(row, FUSED)


def _ratios(row: Record) -> str:
    ratios = [speed_up(row, kind) for kind in KINDS]
    return NONE if ratios[0] is None else " / ".join(NONE if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def _path(row: Record) -> str:
    """Our path, or both where a graph is recorded with another one."""
    auto = row["contenders"].get(AUTO) or {}
    launched, replayed = auto.get("path"), auto.get("replayed_path")
    if launched is None:
        return NONE
    return launched if auto.get("replayed") is None or launched == replayed else f"{launched} / {replayed}"


def _share(row: Record) -> str:
    share = (row["contenders"].get(AUTO) or {}).get("floor_share")
    return NONE if share is None else f"{share:.0%}"


def _memory(row: Record, key: str) -> str:
    sizes = [(row["contenders"].get(name) or {}).get(key) for name in (EAGER, COMPILED, AUTO)]
    return " / ".join(NONE if size is None else _mebibytes(size) for size in sizes)


def _mebibytes(size: int) -> str:
    mebibytes = size / 2**20
    return f"{mebibytes:.0f}" if mebibytes >= 10 else f"{mebibytes:.1f}"


def _piped(words: tuple[str, ...]) -> str:
    return f"| {' | '.join(words)} |"
