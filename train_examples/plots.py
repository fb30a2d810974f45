"""The pictures of a run and of a comparison, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Two colours that are distinct for colour-blind readers and in grey print.
COLOURS = ("#0b6e99", "#d9730d")
TEXT = "#333333"
# For more than two.
MORE_COLOURS = (*COLOURS, "#009e73", "#cc79a7", "#b8a100", "#56b4e9", "#7a4e2d")


def loss_curve(rows: list[dict[str, Any]], title: str, unit: str, path: Path) -> None:
    """Training and validation loss over steps, as a PNG at ``path``."""
    figure = Figure(figsize=(7, 4.3), dpi=150, layout="constrained")
    axes = figure.subplots()
    draw_losses(axes, rows, COLOURS[0], "")
    style(axes, title, "step", f"loss ({unit})")
    axes.legend(frameon=False)
    figure.savefig(path)


def score_curves(
    rows: list[dict[str, Any]], references: Mapping[str, Mapping[str, float]], title: str, path: Path
) -> None:
    """Every score over steps in its own panel, with the baselines as lines, as a PNG at ``path``."""
    names = list(next((row["scores"] for row in rows if row["scores"]), {}))
    figure = Figure(figsize=(4.3 * max(1, len(names)), 4.3), dpi=150, layout="constrained")
    for axes, name in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
        draw_scores(axes, rows, name, COLOURS[0], "model")
        draw_references(axes, references, name)
        style(axes, readable(name), "step", "held-out validation modules")
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=13, color=TEXT, wrap=True)
    figure.savefig(path)


def comparison(
    names: list[str],
    rows: list[list[dict[str, Any]]],
    summaries: list[dict[str, Any]],
    note: str,
    path: Path,
    measured: bool = True,
) -> None:
    """Loss curves of several runs under a title with ``note``, as a PNG; beside them the first score of an example that
    has scores, and bars of speed and peak memory if these were ``measured``, else of what is saved for the backward
    pass."""
    first_scores = next((row["scores"] for run_rows in rows for row in run_rows if row["scores"]), None)
    measures = speed_and_memory(summaries) if measured else memory_kept(summaries)
    widths = (2,) * (1 if first_scores is None else 2) + (1,) * len(measures)
    figure = Figure(figsize=(max(9.0, 3 + 2.5 * sum(widths)), 4.6), dpi=150, layout="constrained")
    losses, *others = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for position, name in enumerate(names):
        # The second run is dashed: two equal curves overlap, and both should be visible.
        draw_losses(losses, rows[position], COLOURS[position % 2], f"{name}: ", dashed=position % 2 == 1)
    style(losses, "Loss", "step", f"loss ({summaries[0]['loss_unit']})")
    losses.legend(frameon=False)

    if first_scores is not None:
        score = next(iter(first_scores))
        for position, name in enumerate(names):
            draw_scores(others[0], rows[position], score, COLOURS[position % 2], name, dashed=position % 2 == 1)
        draw_references(others[0], summaries[0]["references"], score)
        style(others[0], f"{readable(score)} (higher is better)", "step", "held-out validation modules")
        others[0].legend(frameon=False)

    for axes, measure in zip(others[::-1], measures[::-1], strict=False):
        bars(axes, names, measure.values, measure.form)
        style(axes, measure.title, "", measure.unit)
    where = " / ".join(dict.fromkeys(f"{summary['device']}, {summary['precision']}" for summary in summaries))
    title = f"{summaries[0]['example'].replace('_', ' ').capitalize()} on {where}"
    figure.suptitle(f"{title}\n{note}" if note else title, fontsize=13, color=TEXT, wrap=True)
    figure.savefig(path)


class Measure(NamedTuple):
    """One bar chart, with a bar per run."""

    title: str
    unit: str
    values: list[float]
    form: str


def speed_and_memory(summaries: list[dict[str, Any]]) -> list[Measure]:
    """Tokens per second and peak memory of every run."""
    speeds = [summary["tokens_per_second"] or 0 for summary in summaries]
    mebibytes = [summary["peak_memory_bytes"] / 2**20 for summary in summaries]
    source = " / ".join(dict.fromkeys(summary["peak_memory_source"] for summary in summaries))
    return [
        Measure("Speed (higher is better)", "tokens per second, median after warm-up", speeds, "{:,.0f}"),
        Measure("Peak memory (lower is better)", f"MiB, {source}", mebibytes, "{:,.0f}"),
    ]


def memory_kept(summaries: list[dict[str, Any]]) -> list[Measure]:
    """The memory that a training step of each run saves for its backward pass; empty if it was not counted."""
    if not all(summary.get("kept_bytes") for summary in summaries):
        return []
    mebibytes = [summary["kept_bytes"] / 2**20 for summary in summaries]
    return [Measure("Memory (lower is better)", "MiB kept for the backward pass of a step", mebibytes, "{:,.1f}")]


def overlaid_losses(
    panels: Mapping[str, Mapping[str, list[dict[str, Any]]]], unit: str, title: str, path: Path
) -> None:
    """For every model the losses of several runs in one panel, and beside it their differences from the first run, as a
    PNG at ``path``."""
    figure = Figure(figsize=(10, 3.3 * len(panels)), dpi=110, layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for (name, runs), (losses, differences) in zip(panels.items(), grid, strict=True):
        first = next(iter(runs))
        for position, (run, rows) in enumerate(runs.items()):
            colour = MORE_COLOURS[position % len(MORE_COLOURS)]
            # Each line is thinner than the one below it, so that overlapping curves are all visible.
            width = 1 + (len(runs) - 1 - position)
            steps, values = [row["step"] for row in rows], [row["train_loss"] for row in rows]
            losses.plot(steps, values, color=colour, linewidth=width, label=run)
            apart = [value - row["train_loss"] for value, row in zip(values, runs[first], strict=False)]
            differences.plot(steps[: len(apart)], apart, color=colour, linewidth=1.3)
        style(losses, name, "step", f"training loss ({unit})")
        style(differences, f"minus that of {first}", "step", unit)
        losses.legend(frameon=False)
    figure.suptitle(title, fontsize=13, color=TEXT, wrap=True)
    figure.savefig(path)


def losses_of_seeds(
    runs: Mapping[str, Mapping[str, list[tuple[int, float]]]], base: str, unit: str, title: str, path: Path
) -> None:
    """The losses of every seed of every kind of run, and beside them their distances from the mean of ``base``, whose
    seeds span a band, as a PNG at ``path``."""
    figure = Figure(figsize=(12, 4.3), dpi=150, layout="constrained")
    losses, distances = figure.subplots(1, 2)
    steps = [step for step, _ in next(iter(runs[base].values()))]
    of_base = [[loss for _, loss in seed] for seed in runs[base].values()]
    means = [sum(column) / len(column) for column in zip(*of_base, strict=True)]
    apart = [[loss - middle for loss, middle in zip(seed, means, strict=True)] for seed in of_base]
    ends = [(min(column), max(column)) for column in zip(*apart, strict=True)]
    lowest, highest = zip(*ends, strict=True)
    distances.fill_between(steps, lowest, highest, color=MORE_COLOURS[0], alpha=0.25, label=f"{base}, all seeds")
    for colour, (name, seeds) in zip(MORE_COLOURS, runs.items(), strict=False):
        for position, seed in enumerate(seeds.values()):
            values = [loss for _, loss in seed]
            label = name if position == 0 else None
            losses.plot(steps, values, color=colour, linewidth=1.3, label=label)
            if name != base:
                away = [value - middle for value, middle in zip(values, means, strict=True)]
                distances.plot(steps, away, color=colour, linewidth=1.3, label=label)
    style(losses, "Validation loss (lower is better)", "step", unit)
    style(distances, f"minus the mean of {base}", "step", unit)
    losses.legend(frameon=False)
    distances.legend(frameon=False)
    figure.suptitle(title, fontsize=12, color=TEXT, wrap=True)
    figure.savefig(path)


def split_factors(microseconds: Mapping[str, float], title: str, path: Path) -> None:
    """Time over the number of splits, named ``S = 1``, ``S = 2``, ..., and every other name as a horizontal line, as a
    PNG at ``path``."""
    splits = {int(name.removeprefix("S = ")): time for name, time in microseconds.items() if name.startswith("S = ")}
    figure = Figure(figsize=(7, 4.3), dpi=150, layout="constrained")
    axes = figure.subplots()
    best = min(splits, key=lambda split: splits[split])
    label = f"S splits: {splits[best]:.1f} µs with {best}"
    axes.plot(list(splits), list(splits.values()), color=COLOURS[0], linewidth=2.6, marker="o", label=label)
    others = {name: time for name, time in microseconds.items() if not name.startswith("S = ")}
    for colour, line, (name, time) in zip((COLOURS[1], TEXT), ("--", ":"), others.items(), strict=False):
        axes.axhline(time, color=colour, linewidth=1.8, linestyle=line, label=f"{name}: {time:.1f} µs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    style(axes, "Time of the wide product (lower is better)", "split factor S", "µs, replayed, operands from memory")
    axes.set_xticks(list(splits), [str(split) for split in splits])
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize=12, color=TEXT, wrap=True)
    figure.savefig(path)


def readable(score: str) -> str:
    """``recall_at_10`` as recall@10, mrr as MRR."""
    return score.upper() if len(score) <= 3 else score.replace("_at_", "@").replace("_", " ")


def draw_scores(
    axes: Axes, rows: list[dict[str, Any]], score: str, colour: str, label: str, *, dashed: bool = False
) -> None:
    """One score at every evaluation."""
    evaluated = [row for row in rows if row["scores"]]
    axes.plot(
        [row["step"] for row in evaluated],
        [row["scores"][score] for row in evaluated],
        color=colour,
        linewidth=1.2 if dashed else 2.6,
        linestyle="--" if dashed else "-",
        marker="s" if dashed else "o",
        markersize=4 if dashed else 7,
        label=label,
    )


def draw_references(axes: Axes, references: Mapping[str, Mapping[str, float]], score: str) -> None:
    """The baselines, each as a horizontal line."""
    for line, (name, scores) in zip(("-.", "--", ":"), references.items(), strict=False):
        axes.axhline(scores[score], color=TEXT, linewidth=1.3, linestyle=line, label=f"{name}: {scores[score]:.3f}")
    # After all lines are drawn: a limit set earlier would also fix the other end.
    axes.set_ylim(bottom=0)


def draw_losses(axes: Axes, rows: list[dict[str, Any]], colour: str, prefix: str, *, dashed: bool = False) -> None:
    """The training loss as a thin line and the validation loss as a thick one with markers."""
    axes.plot(
        [row["step"] for row in rows],
        [row["train_loss"] for row in rows],
        color=colour,
        alpha=0.45,
        linewidth=1.3,
        linestyle="--" if dashed else "-",
        label=f"{prefix}training",
    )
    evaluated = [row for row in rows if row["validation_loss"] is not None]
    axes.plot(
        [row["step"] for row in evaluated],
        [row["validation_loss"] for row in evaluated],
        color=colour,
        linewidth=1.2 if dashed else 2.6,
        linestyle="--" if dashed else "-",
        marker="s" if dashed else "o",
        markersize=4 if dashed else 7,
        label=f"{prefix}validation",
    )


def bars(axes: Axes, names: list[str], values: list[float], form: str) -> None:
    """One bar per run with its value written above."""
    # On two lines, or long names overlap.
    titles = [name.replace(", ", ",\n") for name in names]
    drawn = axes.bar(titles, values, width=0.6, color=[COLOURS[position % 2] for position in range(len(names))])
    axes.bar_label(drawn, labels=[form.format(value) for value in values], padding=3, color=TEXT, fontsize=11)
    axes.margins(y=0.12)


def style(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Titles, units, a light grid behind the data, and no frame."""
    axes.set_title(title, loc="left", fontsize=12, color=TEXT)
    axes.set_xlabel(x_label, color=TEXT)
    axes.set_ylabel(y_label, color=TEXT)
    # In full: with the default of six digits a million tokens per second would be 1e+06.
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
