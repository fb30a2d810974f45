"""Two runs side by side: ``python -m train_examples.comparison RUN_A RUN_B --output comparison.png``.

Reads the files of both runs (``summary.json``, ``metrics.jsonl``), draws loss, speed and peak memory, and prints a
table. If the runs are on a CPU and differ in layers or losses, torch computes both; then only the loss curves and the
memory kept for the backward pass are compared, and the results of a GPU are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fusedlayers.folders import check_folder
from train_examples import gpu_results, plots
from train_examples.loop import Row
from train_examples.summaries import loss_of, peak_flops, read_run
from train_examples.tables import aligned

ON_A_CPU = "On a CPU torch's operations compute all kinds of layers and losses, so their speed is not compared."


def table(names: Sequence[str], summaries: Sequence[Row], measured: bool = True) -> str:
    """The numbers of the picture as aligned text: one column per run, and the ratio of the last run to the first.

    With ``measured`` speed and memory are shown.
    """
    lines = [
        ("final training loss", "train_loss", 1, "{:.4f}"),
        ("final validation loss", "validation_loss", 1, "{:.4f}"),
    ]
    if measured:
        source = f"peak memory, MiB ({summaries[0]['peak_memory_source']})"
        lines.append(("tokens per second", "tokens_per_second", 1, "{:,.0f}"))
        lines.append((source, "peak_memory_bytes", 2**20, "{:,.0f}"))
    if all(summary.get("kept_bytes") for summary in summaries):
        lines.append(("kept for a backward pass, MiB", "kept_bytes", 2**20, "{:,.1f}"))
    if measured and any(summary.get("model_flops_per_second") for summary in summaries):
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


def name_of(summary: Row) -> str:
    """The settings that distinguish a run."""
    loss = ", loss=fused" if loss_of(summary) == "fused" else ""
    return f"layers={summary['layers']}{loss}{', compiled' * summary.get('compiled', False)}"


def largest_difference(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """The largest differences between the losses of two runs, over the steps that both report, in one sentence."""
    by_step = {row["step"]: row for row in others}
    pairs = [(row, by_step[row["step"]]) for row in rows if row["step"] in by_step]
    found = []
    for key, name in (("train_loss", "training"), ("validation_loss", "validation")):
        apart = [abs(one[key] - other[key]) for one, other in pairs if None not in (one[key], other[key])]
        if apart:
            found.append(f"{max(apart):.2g} over {len(apart)} {name} losses")
    return f"largest difference: {', '.join(found) or 'the runs have no step in common'}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: draw, print, and list the files."""
    parser = argparse.ArgumentParser(prog="python -m train_examples.comparison", description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run.directory of a finished run")
    parser.add_argument("--output", type=Path, default=Path("runs/comparison.png"), metavar="PNG")
    chosen = parser.parse_args(arguments)
    try:
        runs = [read_run(directory) for directory in chosen.runs]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    summaries, rows = [summary for summary, _ in runs], [run_rows for _, run_rows in runs]
    names = [name_of(summary) for summary in summaries]
    if names[0] == names[1]:
        # The end of a long path, so that the legend fits into the picture.
        names = [f"...{text[-29:]}" if len(text) > 32 else text for text in map(str, chosen.runs)]

    if chosen.output.suffix != ".png" or chosen.output.is_dir():
        raise SystemExit(f"error: --output: {str(chosen.output)!r}; expected the name of a file that ends in .png")
    try:
        check_folder(chosen.output.parent)
    except ValueError as error:
        raise SystemExit(f"error: --output: {error}") from error
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    kinds = {(summary["layers"], loss_of(summary)) for summary in summaries}
    measured = len(kinds) == 1 or not all(summary["device"].startswith("CPU") for summary in summaries)
    note = "" if measured else ON_A_CPU
    plots.comparison(names, rows, summaries, note, chosen.output, measured)
    print(table(names, summaries, measured))
    print(largest_difference(*rows))
    if not measured:
        print(note)
    elsewhere = all(summary["device"] != gpu_results.MEASURED.name for summary in summaries)
    if len(kinds) > 1 and elsewhere and summaries[0]["example"] == "language_model":
        print(f"\n{gpu_results.text()}\n")
    for name, directory in zip(names, chosen.runs, strict=True):
        files = ", ".join(sorted(path.name for path in directory.iterdir()))
        print(f"{name}: {directory.absolute()} ({files})")
    print(f"comparison: {chosen.output.absolute()}")


if __name__ == "__main__":
    main()
