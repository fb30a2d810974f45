"""A record of host times as a table and a picture, and what passes its limit."""

from __future__ import annotations

from pathlib import Path

from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import DIRECTIONS, NONE, Table, median, shape_of, timed_rows

from .endings import day_and_commit, over_torch
from .layer_tables import rows_with_times
from .plots import bar_picture, save

TORCH, AUTO, KERNELS, AUTO_FUNCTION = "torch", "auto", "kernels", "function"
# How a contender runs, behind its name: as it is, without autograd's own thread, compiled.
ONE_WAY, ONE_THREAD, COMPILED = "", ", one thread", ", compiled"
# The most that ours may take where the host sets its pace, as multiples of torch's time: (with gradients, without).
LIMITS = {AUTO: (1.03, 1.0), KERNELS: (1.10, 1.0)}
_PASSES = {"forward": "f", "forward_backward": "f+b"}
_COLOURS = {AUTO: "#0072b2", KERNELS: "#e69f00", AUTO_FUNCTION: "#56b4e9"}
_LABELS = {AUTO: "fusedlayers", KERNELS: "forced kernels", AUTO_FUNCTION: "functional.linear"}


def yardstick(name: str) -> str:
    """Torch's name among those that run the same way."""
    return TORCH + name[len(name.partition(",")[0]) :]


def table(record: Record) -> Table:
    """One line for each loop and pass, one column for each contender."""
    rows = timed_rows(record)
    found = {name: None for row in rows for name, entry in row["contenders"].items() if entry["status"] == "timed"}
    names = sorted(found, key=lambda name: (ONE_WAY, ONE_THREAD, COMPILED).index(name[len(name.partition(",")[0]) :]))
    alone = [name for name in names if "," not in name]
    order = " / ".join(map(_label, alone))
    columns = ("layer", "shape", "pass", *map(_label, names), f"host: {order}", f"device: {order}")
    lines = []
    for row in rows:
        host = [row["contenders"].get(name, {}).get("host_seconds") for name in alone]
        device = [median(row, name, "replayed") for name in alone]
        cells = [_cell(row, name) for name in names]
        line = (row["grid"], shape_of(row), _PASSES[row["direction"]], *cells)
        lines.append((*line, *(" / ".join(map(_microseconds, times)) for times in (host, device))))
    return Table("µs a layer (over torch's of its kind; * the host sets the pace)", columns, tuple(lines))


def markdown(record: Record) -> str:
    """The table with its conditions above.

    Raises:
        ValueError: the record holds no times.
    """
    rows = rows_with_times(record)
    device, versions = record["device"], record["versions"]
    # Records of before have no word of it.
    held = "float32 layers under autocast, " if any(row.get("autocast") for row in rows) else ""
    return (
        f"Measured on {device['name']}, torch {versions['torch']}, {day_and_commit(record)}: {held}medians, launched "
        "one by one, all contenders interleaved, and of ratios within a round; *host* is the host's part, *device* the "
        "loop inside a CUDA graph.\n\n" + table(record).markdown()
    )


def over_limits(record: Record) -> list[str]:
    """One line for each time of ours that passes its limit where the host sets its pace."""
    lines = []
    for row in timed_rows(record):
        for name, entry in row["contenders"].items():
            limits, found = LIMITS.get(name.partition(",")[0]), over_torch(row, name)
            if limits is None or found is None or not entry["host_bound"] or name.endswith(COMPILED):
                continue
            limit = limits[row["direction"] == "forward"]
            if found > limit:
                where = f"{row['grid']} {shape_of(row)} {_PASSES[row['direction']]}, {name}"
                lines.append(f"{where}: {found:.2f} of torch's time, at most {limit:.2f}")
    return lines


def plot(record: Record, path: Path) -> list[Path]:
    """``<path without suffix>.png``: time over torch's, for each pass, with autograd's own thread.

    Raises:
        ValueError: the record holds no times.
        MatplotlibMissingError: matplotlib is not installed.
    """
    rows = rows_with_times(record)
    layers = list(dict.fromkeys(_layer(row) for row in rows))
    panels = {}
    for direction, title in DIRECTIONS.items():
        found = {_layer(row): row for row in rows if row["direction"] == direction}
        values = [_over_torch(found[layer]) if layer in found else {} for layer in layers]
        if any(values):
            panels[title] = values
    figure = bar_picture(layers, panels, {label: _COLOURS[name] for name, label in _LABELS.items()})
    title = "Time of a layer launched by itself: multiples of torch's, less is better"
    return [save(figure, record, title, path.with_suffix(".png"))]


def _label(name: str) -> str:
    """What a contender is called in tables and pictures, with the way in which it runs."""
    base = name.partition(",")[0]
    return _LABELS.get(base, base) + name[len(base) :]


def _layer(row: Record) -> str:
    return f"{row['grid']} {shape_of(row)}"


def _over_torch(row: Record) -> dict[str, float]:
    return {label: over for name, label in _LABELS.items() if (over := over_torch(row, name)) is not None}


def _cell(row: Record, name: str) -> str:
    entry = row["contenders"].get(name)
    seconds = median(row, name, "launched")
    if entry is None or seconds is None:
        return NONE
    mark = "*" if entry["host_bound"] else ""
    found = over_torch(row, name)
    return f"{_microseconds(seconds)}{mark}" + ("" if found is None or name == yardstick(name) else f" ({found:.2f})")


def _microseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1e6:.0f}"
