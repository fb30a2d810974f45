"""A record of whole training steps as a table and a picture, and where a model is slower with ours than without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..record import Record
from ..tables import NONE, Table, median, rows_with_times, timed_rows
from .endings import day_and_commit, over_torch
from .plots import figure_class, save
from .step_models import AUTO, KERNELS, LIGER, LIGER_AUTO, NAMES, NORM, RECOMPUTE, TORCH

MODES = ("eager", "compile", "reduce-overhead")
# The most that a step may take with ours in auto mode, as a multiple of the same model's without, in the same mode.
LIMIT = 1.02
_COLOURS = {
    AUTO: "#0072b2", NORM: "#009e73", KERNELS: "#e69f00", RECOMPUTE: "#56b4e9", LIGER: "#cc79a7", LIGER_AUTO: "#d55e00",
}  # fmt: skip
_LABELS = {
    AUTO: "fusedlayers, auto mode", NORM: "fusedlayers with norm=True", KERNELS: "fusedlayers, kernels forced",
    RECOMPUTE: "fusedlayers, recompute=True", LIGER: "Liger-Kernel", LIGER_AUTO: "Liger-Kernel with fusedlayers",
}  # fmt: skip


def peak(row: Record, name: str) -> int | None:
    """The most bytes in tensors during a step, with weights and the optimizer's state."""
    entry = row["contenders"].get(name)
    extra = None if entry is None else entry["peak_bytes"]
    return None if extra is None else row["held_bytes"] + extra


def table(record: Record) -> Table:
    """One line for each model and mode, two columns for each contender."""
    rows = timed_rows(record)
    names = [name for name in NAMES if any(name in row["contenders"] for row in rows)]
    columns = ("model", "tokens", "mode", *(f"{name}, ms" for name in names), *(f"{name}, MiB" for name in names))
    lines = []
    for row in rows:
        times = [_time(row, name) for name in names]
        sizes = [peak(row, name) for name in names]
        memory = [NONE if size is None else f"{size / 2**20:,.0f}" for size in sizes]
        lines.append((row["title"], f"{row['shape'][0]:,}", row["direction"], *times, *memory))
    return Table("A training step (over torch's in the same mode), and the most in memory", columns, tuple(lines))


def markdown(record: Record) -> str:
    """The table with its conditions above.

    Raises:
        ValueError: the record holds no times.
    """
    rows_with_times(record)
    device, versions = record["device"], record["versions"]
    return (
        f"Measured on {device['name']}, torch {versions['torch']}, Triton {versions['triton']}, "
        f"{day_and_commit(record)}: models of Hugging Face's with random weights and without dropout, a fused "
        "AdamW included; medians, all contenders of a model interleaved. In parentheses the time over torch's in the "
        "same mode, the median of all rounds. The most in memory counts weights, the optimizer's state and, where "
        "graphs are recorded, what they hold.\n\n" + table(record).markdown()
    )


def over_limits(record: Record) -> list[str]:
    """One line for each model and mode that is slower with ours, in auto mode, than it may be."""
    found = [(row, over_torch(row, AUTO)) for row in timed_rows(record)]
    return [
        f"{row['grid']}, {row['direction']}: {times:.2f} of its time, at most {LIMIT:.2f}"
        for row, times in found
        if times is not None and times > LIMIT
    ]


def plot(record: Record, path: Path) -> list[Path]:
    """``<path without suffix>.png``: time and memory over torch's in the same mode.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    rows = rows_with_times(record)
    figure = figure_class()(figsize=(max(8, 0.6 * len(rows)), 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    _bars(axes[0], rows, {name: [over_torch(row, name) for row in rows] for name in _COLOURS})
    _bars(axes[1], rows, {name: [_memory_ratio(row, name) for row in rows] for name in _COLOURS})
    axes[0].set_ylabel("time over torch's\n(below 1 is faster)")
    axes[1].set_ylabel("peak memory over torch's\n(below 1 is less)")
    labels = [f"{row['grid']}\n{row['direction']}" for row in rows]
    axes[1].set_xticks(range(len(rows)), labels, rotation=45, ha="right")
    return [save(figure, record, "Whole training steps beside torch in the same mode", path.with_suffix(".png"))]


def _bars(axes: Any, rows: list[Record], series: dict[str, list[float | None]]) -> None:
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        found = {i - 0.4 + (place + 0.5) * width: value for i, value in enumerate(values) if value is not None}
        axes.bar(list(found), list(found.values()), width, label=_LABELS[name], color=_COLOURS[name])
    axes.axhline(1.0, color="black", linewidth=1)
    if series:
        # Above the bars, which a legend among them would hide.
        axes.margins(x=0.01, y=0.25)
        axes.legend(fontsize="small", loc="upper center", ncols=4, frameon=False)


def _memory_ratio(row: Record, name: str) -> float | None:
    ours, theirs = peak(row, name), peak(row, TORCH)
    return None if ours is None or theirs is None else ours / theirs


def _time(row: Record, name: str) -> str:
    seconds, found = median(row, name, "launched"), over_torch(row, name)
    if seconds is None:
        return NONE
    mark = "*" if row["contenders"][name]["host_bound"] else ""
    return f"{seconds * 1e3:.1f}{mark}" + ("" if found is None or name == TORCH else f" ({found:.2f})")
