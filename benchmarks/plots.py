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
        base = next((name for name in TORCH_CONTENDERS if _times(of_grid[0], name)), EAGER)
        shapes = list(dict.fromkeys(map(shape_of, of_grid)))
        panels = {}
        for direction, title in DIRECTIONS.items():
            by_shape = {shape_of(row): row for row in of_grid if row["direction"] == direction}
            for what, measure in (("time", _times), ("peak memory", _peak_memory)):
                values = [_of_contenders(by_shape.get(shape), base, measure) for shape in shapes]
                # A forward pass keeps what the backward pass needs, so its memory alone says little.
                if any(values) and (what == "time" or direction == "forward_backward"):
                    panels[f"{what}\n{title}"] = values
        figure = bar_picture(shapes, panels, {_LABELS.get(name, name): colour for name, colour in COLOURS.items()})
        figure.axes[0].set_ylabel(fill(of_grid[0]["meaning"], 30))
        yardstick = "eager torch" if base == EAGER else base
        title = f"{of_grid[0]['title']}: multiples of {yardstick}'s, less is better"
        written.append(save(figure, record, title, path.with_name(f"{path.stem}-{grid}.png")))
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


def _of_contenders(row: Record | None, base: str, measure: Callable[[Record, str], float | None]) -> dict[str, float]:
    """What every contender of a row takes, as a multiple of what ``base`` takes."""
    if row is None:
        return {}
    names = [name for name in COLOURS if not _same_as_auto(row, name)]
    return multiples({_LABELS.get(name, name): measure(row, name) for name in names}, measure(row, base))


def _times(row: Record, name: str) -> float | None:
    """Inside a CUDA graph, or launched where a contender cannot be captured."""
    replayed = median(row, name, "replayed")
    return median(row, name, "launched") if replayed is None else replayed


def _peak_memory(row: Record, name: str) -> float | None:
    return (row["contenders"].get(name) or {}).get("peak_bytes")


def _same_as_auto(row: Record, name: str) -> bool:
    entry = row["contenders"].get(name)
    return entry is not None and entry["status"] == "same as auto"
