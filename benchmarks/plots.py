"""Pictures of a record of layers, from it alone: speed-up over torch and time over the floor, one PNG per grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusedlayers.bench.contenders import AUTO, AUTOTUNED, CHECKPOINTED, COMPILED, EAGER, FUSED
from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import DIRECTIONS, KINDS, median, shape_of, speed_up

from .layer_tables import HOW_TO_TIME, rows_with_times

# In the order of the bars; chosen to stay apart in print and for colour-blind readers.
_COLOURS = {
    EAGER: "#8c8c8c",
    COMPILED: "#4c4c4c",
    AUTOTUNED: "#b0a090",
    CHECKPOINTED: "#cc79a7",
    "torch function": "#f0e442",
    "Liger": "#009e73",
    "CCE": "#d55e00",
    "quack": "#56b4e9",
    "TRL": "#882255",
    "torch in chunks": "#8c6d31",
    AUTO: "#0072b2",
    FUSED: "#e69f00",
}


class MatplotlibMissingError(RuntimeError):
    """matplotlib, which the ``examples`` extra brings, is not installed."""


def plot(record: Record, path: Path) -> list[Path]:
    """Write ``<path without suffix>-<grid>.png`` for each grid of the record, and return the paths.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    figures = figure_class()
    rows = rows_with_times(record, HOW_TO_TIME)
    written = []
    for grid in dict.fromkeys(row["grid"] for row in rows):
        grid_rows = [row for row in rows if row["grid"] == grid]
        directions = [d for d in DIRECTIONS if any(row["direction"] == d for row in grid_rows)]
        figure = figures(figsize=(7 * len(directions), 8), layout="constrained")
        axes = figure.subplots(2, len(directions), squeeze=False)
        for column, direction in enumerate(directions):
            chosen = [row for row in grid_rows if row["direction"] == direction]
            _speed_ups(axes[0][column], chosen)
            _times(axes[1][column], chosen)
            axes[0][column].set_title(DIRECTIONS[direction])
        written.append(save(figure, record, grid_rows[0]["title"], path.with_name(f"{path.stem}-{grid}.png")))
    return written


def draw(plot_of: Callable[[Record, Path], list[Path]], record: Record, path: Path) -> None:
    """Draw a record, and print which pictures there are.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    for picture in plot_of(record, path):
        print(f"plot:   {picture}")


def figure_class() -> Any:
    """matplotlib's ``Figure``.

    Raises:
        MatplotlibMissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissingError(
            "plots need matplotlib: pip install 'fusedlayers[examples]', then python -m benchmarks.records plot FILE"
        ) from error
    return Figure


def save(figure: Any, record: Record, title: str, target: Path) -> Path:
    """Write a figure under its title and the conditions of its record, and return its file."""
    device = f"{record['device']['name']}, torch {record['versions']['torch']}, {record['started'][:10]}"
    figure.suptitle(f"{title} ({record['rows'][0]['dtype']}, {device})", wrap=True)
    figure.savefig(target, dpi=110)
    return target


def bars(axes: Any, values: Sequence[float | None], place: tuple[int, int], share: float = 1.0, **style: Any) -> None:
    """A bar for each value that is known, around its number; ``place``: the number of this series, and of all.

    ``share`` is that of its place that a bar is wide.
    """
    number, count = place
    width = 0.8 / count
    known = {at - 0.4 + (number + 0.5) * width: value for at, value in enumerate(values) if value is not None}
    if known:
        axes.bar(list(known), list(known.values()), width * share, **style)


def _speed_ups(axes: Any, rows: list[Record]) -> None:
    series = {f"auto mode, {kind}": [speed_up(row, kind) for row in rows] for kind in KINDS}
    forced = [None if _same(row) else speed_up(row, "replayed", FUSED) for row in rows]
    if any(value is not None for value in forced):
        series["forced kernels, replayed"] = forced
    colours = dict(zip(series, ("#56b4e9", _COLOURS[AUTO], _COLOURS[FUSED]), strict=False))
    _bars(axes, rows, series, colours)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylabel("speed-up over the best of torch")
    _legend(axes)


def _times(axes: Any, rows: list[Record]) -> None:
    floors = [row["floor_seconds"] for row in rows]
    known = all(floor is not None for floor in floors)
    series = {}
    for name in _COLOURS:
        times = [None if name == FUSED and _same(row) else _device_time(row, name) for row in rows]
        if any(time is not None for time in times):
            units = floors if known else [1e-6] * len(rows)
            series[name] = [None if t is None else t / unit for t, unit in zip(times, units, strict=True)]
    _bars(axes, rows, series, _COLOURS)
    if known:
        axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log")
    # 2, not 2 × 10⁰, also between powers of ten where there are few.
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_plain_between_powers())
    axes.set_ylabel("time over floor\n(1: as fast as the hardware allows)" if known else "time in µs")
    _legend(axes)


def _plain_between_powers() -> Any:
    from matplotlib.ticker import LogFormatter

    return LogFormatter(minor_thresholds=(1.5, 0.5))


def _device_time(row: Record, name: str) -> float | None:
    replayed = median(row, name, "replayed")
    return median(row, name, "launched") if replayed is None else replayed


def _same(row: Record) -> bool:
    entry = row["contenders"].get(FUSED)
    return entry is not None and entry["status"] == "same as auto"


def _bars(axes: Any, rows: list[Record], series: dict[str, list[float | None]], colours: dict[str, str]) -> None:
    for place, (name, values) in enumerate(series.items()):
        bars(axes, values, (place, len(series)), label=name, color=colours[name])
    axes.set_xticks(range(len(rows)), [shape_of(row) for row in rows], rotation=30, ha="right")
    axes.set_xlabel(rows[0]["meaning"])


def _legend(axes: Any) -> None:
    """Above the bars, which a legend among them would hide."""
    bottom, top = axes.get_ylim()
    room = 1.2 if axes.get_yscale() == "linear" else (top / bottom) ** 0.2
    axes.set_ylim(bottom, top * room)
    axes.legend(fontsize="small", loc="upper center", ncols=4, columnspacing=1.0, handlelength=1.4, frameon=False)
