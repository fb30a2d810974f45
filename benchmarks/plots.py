"""Pictures of records, from them alone: times and memory as multiples of torch's, so that less is always better."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from fusedlayers.bench.contenders import AUTO, AUTOTUNED, CHECKPOINTED, COMPILED, EAGER, FUSED, TORCH_CONTENDERS
from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import DIRECTIONS, median, shape_of

from .layer_tables import HOW_TO_TIME, rows_with_times

# In the order of the bars; chosen to stay apart in print and for colour-blind readers.
COLOURS = {
    EAGER: "#b0b0b0",
    COMPILED: "#616161",
    AUTOTUNED: "#b0a090",
    CHECKPOINTED: "#d55e00",
    "torch function": "#f0e442",
    "torch in chunks": "#8c6d31",
    "Liger": "#cc79a7",
    "CCE": "#009e73",
    "quack": "#56b4e9",
    "TRL": "#882255",
    AUTO: "#0072b2",
    FUSED: "#e69f00",
}
# What the tables of the documentation call ours.
_LABELS = {AUTO: "fusedlayers", FUSED: "forced kernels"}
_COLOURS_OF_LABELS = {_LABELS.get(name, name): colour for name, colour in COLOURS.items()}
# How to read what is measured of a contender from a row, None if it was not.
Measure = Callable[[Record, str], float | None]
# Longer bars are cut off, with their value written at the end: one of them would make all others unreadable.
LONGEST_BAR = 2.5


class MatplotlibMissingError(RuntimeError):
    """matplotlib, which the ``examples`` extra brings, is not installed."""


def plot(record: Record, path: Path) -> list[Path]:
    """Write ``<path without suffix>-<grid>.png`` for each grid of the record, and return the paths.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    rows = rows_with_times(record, HOW_TO_TIME)
    written = []
    for grid in dict.fromkeys(row["grid"] for row in rows):
        of_grid = [row for row in rows if row["grid"] == grid]
        # Several sizes that differ in the number of tokens alone are the points of a line.
        tokens = {row["shape"][0] for row in of_grid}
        growing = len(tokens) > 2 and len({tuple(row["shape"][1:]) for row in of_grid}) == 1
        figure, title = _lines(of_grid) if growing else _multiples(of_grid)
        written.append(save(figure, record, title, path.with_name(f"{path.stem}-{grid}.png")))
    return written


def _multiples(rows: list[Record]) -> tuple[Any, str]:
    """A figure with bars of time and of memory over torch's for each shape, and its title."""
    base = next((name for name in TORCH_CONTENDERS if _time(rows[0], name)), EAGER)
    shapes = list(dict.fromkeys(map(shape_of, rows)))
    panels = {}
    for direction, what, measure in _measures(rows):
        by_shape = {shape_of(row): row for row in rows if row["direction"] == direction}
        values = [_of_contenders(by_shape.get(shape), base, measure) for shape in shapes]
        if any(values):
            panels[f"{what}\n{DIRECTIONS[direction]}"] = values
    figure = bar_picture(shapes, panels, _COLOURS_OF_LABELS)
    figure.axes[0].set_ylabel(fill(rows[0]["meaning"], 30))
    yardstick = "eager torch" if base == EAGER else base
    return figure, f"{rows[0]['title']}: multiples of {yardstick}'s, less is better"


def _lines(rows: list[Record]) -> tuple[Any, str]:
    """A figure with lines of time and of memory over the number of tokens, and its title."""
    panels = _measures(rows)
    figure = figure_class()(figsize=(5 * len(panels), 4.2), layout="constrained")
    for axes, (direction, what, measure) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        chosen = sorted((row for row in rows if row["direction"] == direction), key=lambda row: row["shape"][0])
        unit, name_of_unit = (1e-3, "ms") if what == "time" else (2**30, "GiB")
        series = {}
        for name in COLOURS:
            values = {row["shape"][0]: measure(row, name) for row in chosen if not _same_as_auto(row, name)}
            known = {tokens: value / unit for tokens, value in values.items() if value is not None}
            series[_LABELS.get(name, name)] = known
        over_tokens(axes, series, _COLOURS_OF_LABELS, name_of_unit)
        axes.set_title(f"{what}, {DIRECTIONS[direction]}", fontsize="medium")
    figure.axes[-1].legend(fontsize="small", frameon=False)
    fixed = rows[0]["meaning"].partition(" × ")[2]
    return figure, f"{rows[0]['title']}, {fixed} = {shape_of(rows[0]).partition('×')[2]}: less is better"


def _measures(rows: list[Record]) -> list[tuple[str, str, Measure]]:
    """What is shown: direction, name and measure.

    A forward pass keeps what its backward pass needs, so its own peak says little.
    """
    directions = [direction for direction in DIRECTIONS if any(row["direction"] == direction for row in rows)]
    found: list[tuple[str, str, Measure]] = [(direction, "time", _time) for direction in directions]
    if any(_peak_memory(row, name) for row in rows for name in COLOURS if row["direction"] == "forward_backward"):
        found.append(("forward_backward", "peak memory", _peak_memory))
    return found


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
    figure.suptitle(f"{title}\n{record['rows'][0]['dtype']}, {device}", fontsize="medium", wrap=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    return target


def bar_picture(
    groups: Sequence[str], panels: Mapping[str, Sequence[Mapping[str, float]]], colours: Mapping[str, str]
) -> Any:
    """A figure with a panel for each title, and in each panel a group of bars for each name in ``groups``.

    ``panels`` has the values of every group, multiples of torch's by the name of their bar, and ``colours`` the names
    of all bars in their order. A bar has the same place in all panels; one without any value has none.
    """
    places: dict[tuple[int, str], float] = {}
    centres, below = [], 0.0
    for number in range(len(groups)):
        names = [name for name in colours if any(name in values[number] for values in panels.values())]
        places |= {(number, name): below + position for position, name in enumerate(names)}
        centres.append(below + (len(names) - 1) / 2)
        below += len(names) + 0.8
    figure = figure_class()(figsize=(10, max(3.2, 1.4 + 0.17 * below)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    legend = {}
    for axes, (title, values) in zip(all_axes, panels.items(), strict=True):
        for name, colour in colours.items():
            known = {places[number, name]: found[name] for number, found in enumerate(values) if name in found}
            if not known:
                continue
            lengths = [min(value, LONGEST_BAR) for value in known.values()]
            legend[name] = axes.barh(list(known), lengths, height=0.9, color=colour)
            labels = [f"{value:.2f}" + " (cut off)" * (value > LONGEST_BAR) for value in known.values()]
            # Where the line crosses a label, the label hides it.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(legend[name], labels, padding=2, fontsize=7, bbox=behind)
        axes.axvline(1.0, color="black", linewidth=0.8)
        # Room for the value of the longest bar.
        axes.set_xlim(0, 1.15 * max(axes.get_xlim()[1] / 1.05, 1.0))
        axes.set_title(title, fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_yticks(centres, groups, fontsize="small")
    all_axes[0].set_ylim(below - 0.8, -1.0)
    ordered = [name for name in colours if name in legend]
    handles = [legend[name] for name in ordered]
    figure.legend(handles, ordered, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def multiples(values: Mapping[str, float | None], yardstick: float | None) -> dict[str, float]:
    """What is known of these values, over the yardstick; nothing without one."""
    return {name: value / yardstick for name, value in values.items() if value is not None} if yardstick else {}


def over_tokens(axes: Any, series: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], unit: str) -> None:
    """A line for each contender: its values, in this unit, by the number of tokens."""
    for name, values in series.items():
        if values:
            axes.plot(list(values), list(values.values()), marker="o", markersize=4, color=colours[name], label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def _of_contenders(row: Record | None, base: str, measure: Measure) -> dict[str, float]:
    """What every contender of a row takes, as a multiple of what ``base`` takes."""
    if row is None:
        return {}
    names = [name for name in COLOURS if not _same_as_auto(row, name)]
    return multiples({_LABELS.get(name, name): measure(row, name) for name in names}, measure(row, base))


def _time(row: Record, name: str) -> float | None:
    """Inside a CUDA graph, or launched where a contender cannot be captured."""
    replayed = median(row, name, "replayed")
    return median(row, name, "launched") if replayed is None else replayed


def _peak_memory(row: Record, name: str) -> float | None:
    return (row["contenders"].get(name) or {}).get("peak_bytes")


def _same_as_auto(row: Record, name: str) -> bool:
    entry = row["contenders"].get(name)
    return entry is not None and entry["status"] == "same as auto"
