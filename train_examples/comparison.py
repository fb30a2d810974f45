"""Two runs side by side: ``python -m train_examples.comparison RUN_A RUN_B --output comparison.png``.

Reads what the runs wrote (``summary.json``, ``metrics.jsonl``); draws loss, speed and peak memory; prints a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fusedlayers.folders import check_folder
from train_examples import plots
from train_examples.loop import Row, read_metrics

# FLOP/s of one device in 16 bits, dense, by its data sheet.
PEAKS = {"NVIDIA H200": 989e12}


def peak_flops(summary: Row) -> float | None:
    """FLOP/s that the data sheet promises for all devices of a run together, None where that is not known here."""
    peak = PEAKS.get(summary["device"]) if summary["precision"] in ("bf16-mixed", "16-mixed") else None
    return None if peak is None else peak * summary.get("processes", 1)


def read_run(directory: Path) -> tuple[Row, list[Row]]:
    """Summary and metrics of a finished run.

    Raises:
        ValueError: names the directory that holds no finished run.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        return summary, read_metrics(directory / "metrics.jsonl")
    except OSError:
        raise ValueError(f"{directory} holds no summary.json; expected the run.directory of a finished run") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory}: summary.json or metrics.jsonl is no JSON: {error}") from error


def table(names: Sequence[str], summaries: Sequence[Row]) -> str:
    """The numbers of the picture as aligned text, one column per run, and how the last run relates to the first."""
    lines = [
        ("final training loss", "train_loss", 1, "{:.4f}"),
        ("final validation loss", "validation_loss", 1, "{:.4f}"),
        ("tokens per second", "tokens_per_second", 1, "{:,.0f}"),
        (f"peak memory, MiB ({summaries[0]['peak_memory_source']})", "peak_memory_bytes", 2**20, "{:,.0f}"),
    ]
    if any(summary.get("model_flops_per_second") for summary in summaries):
        lines.append(("TFLOP/s of the model", "model_flops_per_second", 1e12, "{:,.3g}"))
        peak = peak_flops(summaries[0])
        if peak is not None and all(peak_flops(summary) == peak for summary in summaries):
            share = f"share of the data sheet's {peak / 1e12:.0f} TFLOP/s, %"
            lines.append((share, "model_flops_per_second", peak / 100, "{:.1f}"))
    lines += [
        (f"{plots.readable(score)} on held-out test modules", score, 1, "{:.3f}")
        for score in summaries[0].get("test_scores", {})
    ]
    cells = [["", *names, f"{names[-1]} / {names[0]}"]]
    for title, key, unit, form in lines:
        values = [{**summary, **summary.get("test_scores", {})}.get(key) for summary in summaries]
        known = all(value is not None for value in values)
        shown = ["not measured" if value is None else form.format(value / unit) for value in values]
        cells.append([title, *shown, f"{values[-1] / values[0]:.3f}" if known and values[0] else ""])
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as text: the first column begins, the others end under one another."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: draw, print, and say where every file is."""
    parser = argparse.ArgumentParser(prog="python -m train_examples.comparison", description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run.directory of a finished run")
    parser.add_argument("--output", type=Path, default=Path("runs/comparison.png"), metavar="PNG")
    chosen = parser.parse_args(arguments)
    try:
        runs = [read_run(directory) for directory in chosen.runs]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    summaries, rows = [summary for summary, _ in runs], [run_rows for _, run_rows in runs]
    names = [f"layers={summary['layers']}{', compiled' * summary.get('compiled', False)}" for summary in summaries]
    if names[0] == names[1]:
        names = [str(directory) for directory in chosen.runs]

    try:
        check_folder(chosen.output.parent)
    except ValueError as error:
        raise SystemExit(f"error: --output: {error}") from error
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    note = ""
    if all(summary["device"].startswith("CPU") for summary in summaries):
        note = "On a CPU every kind of layers computes with the operations of torch: no kernel of ours runs."
    plots.comparison(names, rows, summaries, note, chosen.output)
    print(table(names, summaries))
    print(note)
    for name, directory in zip(names, chosen.runs, strict=True):
        files = ", ".join(sorted(path.name for path in directory.iterdir()))
        print(f"{name}: {directory.absolute()} ({files})")
    print(f"comparison: {chosen.output.absolute()}")


if __name__ == "__main__":
    main()
