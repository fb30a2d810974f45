"""Time and error of a split product over the split factor S: why splitting helps, and what it does to accuracy.

    python -m benchmarks.sweep                         the published shapes, a record and its picture
    python -m benchmarks.sweep --shape 64x64x65536

Times are those of replayed work over rotating inputs; errors are largest and root mean square ones against float64, as
shares of the root mean square of the exact result. S = 1 is the same kernel without a split.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, parse_shape, positive, record_path
from fusedlayers.bench.cases import DTYPES, Draw, Shape, shape_text
from fusedlayers.bench.cases.split_k import CASE as SPLIT_K
from fusedlayers.bench.contenders import EAGER, FUSED_SWITCHES, Contender, contender
from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import NONE, Table
from fusedlayers.bench.timing import NotTimed, clock_for, measure
from fusedlayers.bench.work import random_work, reference_results, timed_work
from fusedlayers.functional.switches import switched

from .endings import answered, chosen_gpu
from .plots import draw, figure_class, save

SPLITS = (1, 2, 3, 5, 8, 16, 32, 64, 128, 256)
SHAPES: tuple[Shape, ...] = ((64, 64, 65536), (16, 1024, 4096), (16, 16, 1048576), (64, 1024, 8192))


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shape",
        type=lambda text: parse_shape(text, SPLIT_K.letters, SPLIT_K.meaning),
        action="extend",
        nargs="+",
        metavar="MxNxK",
    )
    parser.add_argument("--seconds", type=positive, default=0.5, help="timing per shape, beside warm-up (default: 0.5)")
    add_record_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    device, dtype = chosen_gpu(chosen, "the sweep times kernels"), chosen.dtype or "bf16"
    path = record_path(chosen.output, "split_k_sweep", dtype, device)
    method = {
        "seconds_per_row": chosen.seconds,
        "cold_cache_bytes": clock_for(device).cold_cache_bytes,
        "init": "normal",
        "seed": chosen.seed,
    }
    record = records.new_record(words, device, method, chosen.commit)
    for shape in chosen.shape or SHAPES:
        record["rows"].append(_row(shape, dtype, device, chosen.seconds, chosen.seed))
        records.write(record, path)
        print(table(record["rows"][-1]).plain())
    records.finish(record, path)
    print(f"record: {path}")
    draw(plot, record, path)
    return 0


def _row(shape: Shape, dtype: str, device: torch.device, seconds: float, seed: int) -> Record:
    """Time and errors of torch, of every split factor, and of the planner's choice."""
    drawn = Draw(DTYPES[dtype], device, seed=seed)
    options = SPLIT_K.grids[0].options
    clock = clock_for(device)
    entrants = [contender(EAGER, SPLIT_K, options)]
    for split_k in (*SPLITS, "auto"):
        entrants.append(Contender(f"S = {split_k}", _with(split_k), FUSED_SWITCHES))
    work = random_work(SPLIT_K, options, shape, drawn, backward=False)
    (truth,) = reference_results(SPLIT_K, options, work)
    errors = {entrant.name: _errors(_result(entrant, work), truth) for entrant in entrants}
    rotating = timed_work(SPLIT_K, options, shape, drawn.another(1), False, clock.cold_cache_bytes)
    timings = measure(entrants, rotating, seconds=seconds, clock=clock)
    entries = {}
    for name, timing in timings.items():
        entries[name] = {
            "microseconds": None if isinstance(timing, NotTimed) else 1e6 * timing.device_seconds,
            "reason": timing.reason if isinstance(timing, NotTimed) else "",
            "max_error": errors[name][0],
            "rms_error": errors[name][1],
        }
    return {"case": "split_k_sweep", "shape": list(shape), "dtype": dtype, "entries": entries}


def _with(split_k: int | str) -> Any:
    return lambda **inputs: SPLIT_K.ours(**inputs, split_k=split_k)


def _result(entrant: Contender, work: Any) -> Tensor:
    with switched(entrant.switches):
        (y,) = work.run(entrant.call)
    return y


def _errors(y: Tensor, truth: Tensor) -> tuple[float, float]:
    """Largest and root mean square error, as shares of the root mean square of the truth."""
    unit = truth.square().mean().sqrt()
    difference = y.double() - truth
    return float(difference.abs().max() / unit), float(difference.square().mean().sqrt() / unit)


def table(row: Record) -> Table:
    """One shape: a line for each split factor."""
    lines = [
        (
            name,
            NONE if entry["microseconds"] is None else f"{entry['microseconds']:.1f}",
            f"{entry['max_error']:.2e}",
            f"{entry['rms_error']:.2e}",
        )
        for name, entry in row["entries"].items()
    ]
    return Table(f"{shape_text(row['shape'])}, {row['dtype']}", ("split", "µs", "max error", "RMS error"), tuple(lines))


def markdown(record: Record) -> str:
    """The tables of all shapes."""
    return "\n".join(table(row).markdown() for row in record["rows"])


def plot(record: Record, path: Path) -> list[Path]:
    """``<path without suffix>.png``: the time of every shape over S, and that of torch as a line.

    The table has the errors, which hardly depend on S.

    Raises:
        MatplotlibMissingError: matplotlib is not installed.
    """
    figures = figure_class()
    from matplotlib.ticker import LogLocator, NullLocator

    rows = record["rows"]
    figure = figures(figsize=(5 * len(rows), 4), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        entries = {s: row["entries"][f"S = {s}"]["microseconds"] for s in SPLITS}
        known = {s: time for s, time in entries.items() if time is not None}
        axes.plot(list(known), list(known.values()), marker="o", color="#0072b2", label="split kernels")
        for name, label, colour, line in (
            (EAGER, EAGER, "#616161", "--"), ("S = auto", "fusedlayers, S chosen", "#d55e00", ":")
        ):  # fmt: skip
            if row["entries"][name]["microseconds"] is not None:
                axes.axhline(row["entries"][name]["microseconds"], color=colour, label=label, linestyle=line)
        axes.set(xscale="log", yscale="log", xlabel="split factor S", title=shape_text(row["shape"]))
        axes.set_xticks(list(known), list(map(str, known)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    figure.axes[0].set_ylabel("µs (less is better)")
    figure.axes[0].legend(fontsize="small", frameon=False)
    return [save(figure, record, "Split-K linear over its split factor", path.with_suffix(".png"))]


if __name__ == "__main__":
    sys.exit(main())
