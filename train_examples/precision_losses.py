"""Loss curves in 8 bits beside those in 16, over several seeds.

    python -m train_examples.precision_losses RUN... --write

reads finished runs that differ only in ``layers.precision`` and ``run.seed``, and writes their validation losses and a
picture, from which ``python -m benchmarks.pages`` makes the table of the documentation; without ``--write`` it only
prints that. Without runs, it reads the committed record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from omegaconf import OmegaConf

from train_examples import plots
from train_examples.end_to_end import ROOT, origin, origin_of, show
from train_examples.loop import Row
from train_examples.summaries import read_run
from train_examples.tables import table

RECORD = ROOT / "train_examples" / "results" / "precision-losses-h200.json"
# Equal in all runs of a record.
SHARED = ("example", "device", "precision", "torch", "triton", "fusedlayers", "steps", "loss_unit")
# The precision of runs without ``layers.precision``, which the others are compared with.
BASE = "16 bits"
# Settings that may differ, beside the precision of layers and the seed.
MAY_DIFFER = ("directory", "overwrite", "seed")


def record_of(directories: Sequence[Path]) -> Row:
    """Step and validation loss of every evaluation, by precision and seed.

    Raises:
        ValueError: names the run that is not finished, is given twice, or differs in something else.
    """
    record: Row = {}
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for directory in directories:
        summary, metrics = read_run(directory)
        config = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        assert isinstance(config, dict)
        precision = config["layers"].pop("precision") or BASE
        for name in MAY_DIFFER:
            config["run"].pop(name)
        shared = {key: summary[key] for key in SHARED} | {"config": config}
        record = record or shared
        if differing := [key for key in shared if shared[key] != record[key]]:
            raise ValueError(f"{directory} differs from {directories[0]} in {', '.join(differing)}; expected precision")
        losses = [(row["step"], row["validation_loss"]) for row in metrics if row["validation_loss"] is not None]
        of_seeds, seed = runs.setdefault(precision, {}), f"{summary['seed']}"
        if seed in of_seeds:
            raise ValueError(f"{directory} is a second run in {precision} with seed {seed}; expected one of each")
        of_seeds[seed] = losses
    if BASE not in runs:
        raise ValueError(f"expected runs without layers.precision among {', '.join(map(str, directories))}")
    return {**record, **origin(), "runs": dict(sorted(runs.items(), key=lambda named: (named[0] != BASE, named[0])))}


def markdown(record: Row) -> str:
    """The conditions, the final losses of all seeds, and the picture."""
    config = record["config"]
    model, optimizer = config["model"], config["optim"]
    tokens = config["run"]["batch_size"] * model["context"]
    planned = f"{config['run']['steps']:,}"
    steps = planned if record["steps"] == config["run"]["steps"] else f"the first {record['steps']:,} of {planned}"
    source = RECORD.relative_to(ROOT).as_posix()
    conditions = (
        f"Measured on {record['device']}, {record['precision']}, torch {record['torch']}, Triton {record['triton']}, "
        f"{origin_of(record)} (`{source}`): the language model of the examples, model={model['name']} "
        f"({model['layers']} layers of {model['d_model']} × {model['d_ff']}), {steps} steps of {tokens:,} tokens, "
        f"learning rate {optimizer['learning_rate']:g}."
    )
    final = {name: [losses[-1][1] for losses in seeds.values()] for name, seeds in record["runs"].items()}
    base = mean(final[BASE])
    lines = [
        (
            name,
            ", ".join(f"{loss:.4f}" for loss in losses),
            f"{mean(losses):.4f}",
            "" if name == BASE else f"{mean(losses) - base:+.4f}".replace("-", "−"),
            f"{max(losses) - min(losses):.4f}",
        )
        for name, losses in final.items()
    ]
    columns = ("precision", "validation loss of each seed", "mean", "minus 16 bits", "largest minus smallest")
    picture = RECORD.with_suffix(".png").relative_to(ROOT).as_posix()
    return f"{conditions}\n\n{table(columns, lines)}\n\n![Validation losses of all seeds]({picture})\n"


def draw(record: Row, path: Path) -> None:
    """The validation losses of all runs, and their distance from the mean of those in 16 bits, as a PNG."""
    plots.losses_of_seeds(record["runs"], BASE, record["loss_unit"], f"{record['device']}, {record['precision']}", path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: print the table, or write what it shows."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m train_examples.precision_losses", description=description)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run.directory of a finished run")
    parser.add_argument("--write", action="store_true", help="the record and its picture")
    chosen = parser.parse_args(arguments)
    try:
        record = record_of(chosen.runs) if chosen.runs else json.loads(RECORD.read_text())
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    show(record, RECORD, markdown, draw, writing=chosen.write)


if __name__ == "__main__":
    main()
