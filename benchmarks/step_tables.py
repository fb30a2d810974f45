"""A record of whole training steps as a table and a picture, and where a model is slower with ours than without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import NONE, Table, median, timed_rows

from .endings import day_and_commit, over_torch
from .layer_tables import other_commits, rows_with_times
from .plots import bars, figure_class, save
from .step_models import AUTO, FP8, IN_16_BITS, KERNELS, LIGER, LIGER_AUTO, NAMES, NORM, RECOMPUTE, TORCH

MODES = ("eager", "compile", "reduce-overhead")
# The columns of the first page: contender, mode, and heading. One of which nothing was timed is left out.
WAYS = (
    (TORCH, "eager", "torch"),
    (TORCH, "compile", "torch, compiled"),
    (LIGER, "eager", "Liger"),
    (NORM, "eager", "fusedlayers"),
    (LIGER_AUTO, "eager", "fusedlayers and Liger"),
    (NORM, "compile", "fusedlayers, compiled"),
    (FP8, "compile", "fusedlayers, fp8, compiled"),
)
# Its lines: wide and narrow models, one with large logits, experts, and one for which the host sets the pace.
FIRST_PAGE = ("llama-2048", "phi3-3072", "qwen2-896", "gpt2-768", "mixtral-1024", "llama-512")
_LIBRARIES = {"torch": "torch", "triton": "Triton", "transformers": "transformers", "liger_kernel": "Liger-Kernel"}
# The most that a step may take with ours in auto mode, as a multiple of the same model's without, in the same mode.
LIMIT = 1.02
_COLOURS = {
    AUTO: "#0072b2", NORM: "#009e73", KERNELS: "#e69f00", RECOMPUTE: "#56b4e9", LIGER: "#cc79a7", LIGER_AUTO: "#d55e00",
    FP8: "#00704a",
}  # fmt: skip
_LABELS = {
    AUTO: "fusedlayers, norm=False", NORM: "fusedlayers", KERNELS: "fusedlayers, kernels forced",
    RECOMPUTE: "fusedlayers, recompute=True", LIGER: "Liger-Kernel", LIGER_AUTO: "Liger-Kernel with fusedlayers",
    FP8: "fusedlayers in fp8",
}  # fmt: skip


class Cell(NamedTuple):
    """Median seconds and most bytes of a contender's step, and what is shown where it was not timed."""

    seconds: float | None
    size: int | None
    untimed: str


def peak(row: Record, name: str) -> int | None:
    """The most bytes in tensors during a step, with weights and the optimizer's state."""
    entry = row["contenders"].get(name)
    extra = None if entry is None else entry["peak_bytes"]
    return None if extra is None else row["held_bytes"] + extra


def table(record: Record) -> Table:
    """One line for each model and mode, a column for each contender."""
    rows = timed_rows(record)
    names = [name for name in NAMES if any(name in row["contenders"] for row in rows)]
    lines = [
        (row["title"], f"{row['shape'][0]:,}", row["direction"], *(_time_and_peak(row, name) for name in names))
        for row in rows
    ]
    title = "A training step: ms (over torch's in the same mode) / most MiB"
    return Table(title, ("model", "tokens", "mode", *names), tuple(lines))


def first_page(record: Record) -> tuple[list[str], dict[str, list[Cell]]]:
    """The titles of the models of the :data:`FIRST_PAGE`; and by heading the cells of each of the :data:`WAYS`."""
    rows = {(row["grid"], row["direction"]): row for row in timed_rows(record)}
    models = [model for model in FIRST_PAGE if (model, "eager") in rows]
    columns = {heading: [_cell(rows.get((model, mode)), name) for model in models] for name, mode, heading in WAYS}
    timed = {heading: cells for heading, cells in columns.items() if any(cell.seconds for cell in cells)}
    return [rows[model, "eager"]["title"] for model in models], timed


def overview(record: Record) -> Table:
    """The table of the first page: a line for each model, whose fastest way is bold."""
    titles, columns = first_page(record)
    lines = [(title, *_bold_fastest(cells)) for title, *cells in zip(titles, *columns.values(), strict=True)]
    return Table("A training step", (f"ms / GiB on one {card(record)}", *columns), tuple(lines))


def card(record: Record) -> str:
    """The short name of the device of a record: H200."""
    return str(record["device"]["name"]).removeprefix("NVIDIA ").split()[0]


def conditions(record: Record, rows: Sequence[Record]) -> str:
    """Where, when and with which libraries these rows of a record were measured, in a line."""
    device, versions = record["device"], record["versions"]
    libraries = [f"{title} {versions[name]}" for name, title in _LIBRARIES.items() if versions.get(name)]
    parts = [device["name"], *libraries, day_and_commit(record), *other_commits(rows)]
    return f"Measured on {', '.join(parts)}"


def markdown(record: Record) -> str:
    """The table with its conditions above.

    Raises:
        ValueError: the record holds no times.
    """
    rows = rows_with_times(record)
    return (
        f"{conditions(record, rows)}: models of Hugging Face's with random weights and without dropout, a fused "
        "AdamW included; medians and half the distance of the quartiles, all contenders of a model interleaved, all "
        "with the same attention without a mask. In parentheses the time over torch's in the same mode, the median of "
        "all rounds; `*`: the host sets the pace. The most in memory counts weights, the optimizer's state and, where "
        "graphs are recorded, what they hold.\n\n" + table(record).markdown()
    )


def over_limits(record: Record) -> list[str]:
    """One line for each model and mode that is slower with ours, in auto mode, than it may be."""
    found = [(row, name, over_torch(row, name)) for row in timed_rows(record) for name in (AUTO, NORM)]
    return [
        f"{row['grid']}, {row['direction']}, {name}: {times:.2f} of its time, at most {LIMIT:.2f}"
        for row, name, times in found
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
    for place, (name, values) in enumerate(series.items()):
        bars(axes, values, (place, len(series)), label=_LABELS[name], color=_COLOURS[name])
    axes.axhline(1.0, color="black", linewidth=1)
    if series:
        # Above the bars, which a legend among them would hide.
        axes.margins(x=0.01, y=0.25)
        axes.legend(fontsize="small", loc="upper center", ncols=4, frameon=False)


def _memory_ratio(row: Record, name: str) -> float | None:
    ours, theirs = peak(row, name), peak(row, TORCH)
    return None if ours is None or theirs is None else ours / theirs


def _cell(row: Record | None, name: str) -> Cell:
    seconds = None if row is None else median(row, name, "launched")
    if row is None or seconds is None:
        return Cell(None, None, NONE if row is None else _untimed(row, name))
    return Cell(seconds, peak(row, name), "")


def _bold_fastest(cells: Sequence[Cell]) -> list[str]:
    least = min((cell.seconds for cell in cells if cell.seconds is not None), default=None)
    shown = []
    for seconds, size, untimed in cells:
        if seconds is None or size is None:
            shown.append(untimed)
            continue
        milliseconds = f"{seconds * 1e3:.1f}"
        shown.append(f"{f'**{milliseconds}**' if seconds == least else milliseconds} / {size / 2**30:.1f}")
    return shown


def _time_and_peak(row: Record, name: str) -> str:
    seconds, over = median(row, name, "launched"), over_torch(row, name)
    if seconds is None:
        return _untimed(row, name)
    entry = row["contenders"][name]
    half = (entry["launched"]["third_quartile"] - entry["launched"]["first_quartile"]) / 2
    ratio = "" if over is None or name == TORCH else f" ({over:.2f})"
    mark = "*" if entry["host_bound"] else ""
    return f"{seconds * 1e3:.1f} ± {half * 1e3:.1f}{mark}{ratio} / {_mebibytes(peak(row, name))}"


def _untimed(row: Record, name: str) -> str:
    """What stands in place of a time."""
    return "as bf16" if row["contenders"].get(name, {}).get("reason") == IN_16_BITS else NONE


def _mebibytes(size: int | None) -> str:
    return NONE if size is None else f"{size / 2**20:,.0f}"
