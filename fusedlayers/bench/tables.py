"""Tables of words, and the one that shows a record on the screen. Numbers come from the record alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cases import shape_text
from .contenders import AUTO, COMPILED, EAGER, FUSED, TORCH_CONTENDERS
from .record import Record

# Auto mode should not be slower than this share of the best of torch's times.
ENOUGH = 0.97
KINDS = ("launched", "replayed")
PATHS = {"launched": "path", "replayed": "replayed_path"}
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
NONE = "–"
_USUAL = (EAGER, COMPILED, AUTO, FUSED)


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

    def show(self) -> None:
        """Prints it: on a terminal through rich, if that is installed, otherwise in plain columns."""
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            print(self.plain())
            return
        console = Console()
        if not console.is_terminal:
            # In a file or a pipe, rich would cut the table to 80 columns.
            print(self.plain())
            return
        shown = RichTable(title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in self.columns:
            shown.add_column(column, no_wrap=True)
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)


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
    rows = timed_rows(record)
    more = asked_for(rows)
    columns = ("grid", "shape", "pass", "eager", "compile", *more, "auto", "path", "fused", "speed-up", "of floor")
    passes = {"forward": "f", "forward_backward": "f+b"}
    lines = [(row["grid"], shape_of(row), passes[row["direction"]], *cells(row, more)) for row in rows]
    return Table("µs, launched / replayed (* host-bound); speed-up over the best of torch", columns, tuple(lines))


def asked_for(rows: list[Record]) -> list[str]:
    """The contenders beside the usual ones, which were timed because somebody asked for them."""
    return [name for name in dict.fromkeys(name for row in rows for name in row["contenders"]) if name not in _USUAL]


def cells(row: Record, more: Sequence[str]) -> list[str]:
    """Times of torch's, of ``more`` and of ours, our path, the kernels' time, our speed-up, and the floor's share."""
    times = [_times(row, name) for name in (EAGER, COMPILED, *more, AUTO)]
    return [*times, _path(row), _forced(row), _ratios(row), _share(row)]


def shape_of(row: Record) -> str:
    """The shape of a record's row: ``65536×256×1024``."""
    return shape_text(row["shape"])


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


def _piped(words: tuple[str, ...]) -> str:
    return f"| {' | '.join(words)} |"
