"""A record of whole training steps as a table and a picture, and where a model is slower with ours than without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import NONE, Table, median, timed_rows

from .endings import day_and_commit, over_torch
from .layer_tables import other_commits, rows_with_times
from .plots import bar_picture, multiples, save
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
COLOURS = {
    TORCH: "#b0b0b0", LIGER: "#cc79a7", AUTO: "#56b4e9", NORM: "#0072b2", LIGER_AUTO: "#d55e00", KERNELS: "#e69f00",
    RECOMPUTE: "#009e73", FP8: "#882255",
}  # fmt: skip
LABELS = {
    TORCH: "torch", LIGER: "Liger", AUTO: "fusedlayers, norm=False", NORM: "fusedlayers",
    LIGER_AUTO: "fusedlayers and Liger", KERNELS: "fusedlayers, forced kernels",
    RECOMPUTE: "fusedlayers, recompute=True", FP8: "fusedlayers, fp8",
}  # fmt: skip
_LABELS_OF_MODES = {"eager": "", "compile": ", compiled", "reduce-overhead": ", reduce-overhead"}


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
    return Table(title, ("model", "tokens", "mode", *(LABELS[name] for name in names)), tuple(lines))


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
        "with the same attention without a mask. In parentheses the time over torch's in the same mode; `*`: the host "
        "sets the pace. The most in memory counts weights, the optimizer's state and, where graphs are recorded, what "
        "they hold.\n\n" + table(record).markdown()
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
    """``<path without suffix>.png``: time and peak memory of all contenders in all modes, over those of torch.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    models = list(dict.fromkeys(row["grid"] for row in rows_with_times(record)))
    ways = [(name, mode, label + way) for name, label in LABELS.items() for mode, way in _LABELS_OF_MODES.items()]
    return [picture(record, models, ways, path.with_suffix(".png"))]


def picture(record: Record, models: Sequence[str], ways: Sequence[tuple[str, str, str]], target: Path) -> Path:
    """Draw these models in these ways (contender, mode and name); 1 is torch in the first mode of the record.

    A model that has no times in that mode is left out.
    """
    rows = {(row["grid"], row["direction"]): row for row in timed_rows(record)}
    first_mode = next(mode for mode in MODES if any((model, mode) in rows for model in models))
    titles = []
    times, memory = list[dict[str, float]](), list[dict[str, float]]()
    for model in models:
        yardstick = rows.get((model, first_mode))
        if yardstick is None:
            continue
        titles.append(yardstick["title"].replace(", ", ",\n"))
        found = [(heading, rows[model, mode], name) for name, mode, heading in ways if (model, mode) in rows]
        timed = [(heading, row, name) for heading, row, name in found if median(row, name, "launched") is not None]
        seconds = {heading: median(row, name, "launched") for heading, row, name in timed}
        times.append(multiples(seconds, median(yardstick, TORCH, "launched")))
        memory.append(multiples({heading: peak(row, name) for heading, row, name in timed}, peak(yardstick, TORCH)))
    panels = {"time of a step": times, "peak memory": memory}
    colours = {heading: _darker(COLOURS[name], MODES.index(mode)) for name, mode, heading in ways}
    figure = bar_picture(titles, {title: values for title, values in panels.items() if any(values)}, colours)
    return save(figure, record, f"Whole training steps: multiples of {first_mode} torch's, less is better", target)


def _darker(colour: str, times: int) -> str:
    """A colour ``#rrggbb`` whose parts are multiplied by 0.55 so many times."""
    parts = (int(int(colour[at : at + 2], 16) * 0.55**times) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


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
    seconds, theirs = median(row, name, "launched"), median(row, TORCH, "launched")
    if seconds is None:
        return _untimed(row, name)
    entry = row["contenders"][name]
    half = (entry["launched"]["third_quartile"] - entry["launched"]["first_quartile"]) / 2
    ratio = "" if theirs is None or name == TORCH else f" ({seconds / theirs:.2f})"
    mark = "*" if entry["host_bound"] else ""
    return f"{seconds * 1e3:.1f} ± {half * 1e3:.1f}{mark}{ratio} / {_mebibytes(peak(row, name))}"


def _untimed(row: Record, name: str) -> str:
    """What stands in place of a time."""
    return "as bf16" if row["contenders"].get(name, {}).get("reason") == IN_16_BITS else NONE


def _mebibytes(size: int | None) -> str:
    return NONE if size is None else f"{size / 2**20:,.0f}"
