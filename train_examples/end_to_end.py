"""Tables of whole training runs on a GPU, and the record behind them.

    python -m train_examples.end_to_end RUN... --longest runs/longest_sequence.json --write

reads finished runs of the language model, of any models and batch sizes, and writes the record and a picture of their
losses, from which ``python -m benchmarks.pages`` makes the tables of the documentation; without ``--write`` it only
prints them. ``--keep`` keeps the other groups of the committed record, if they were measured on the same device with
the same torch and Triton. Without runs, it uses those of the committed record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from omegaconf import OmegaConf

from train_examples import plots
from train_examples.loop import Row
from train_examples.summaries import loss_of, peak_flops, read_run
from train_examples.tables import table

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "train_examples" / "results" / "end-to-end-h200.json"
# Equal in all runs of a record; runs of one model and batch size form a group.
SHARED = ("example", "device", "precision", "torch", "triton", "fusedlayers")
# Settings of run that may differ within a group, besides layers and loss: how much of the run is written down.
MAY_DIFFER = ("directory", "overwrite", "resume", "compile", "checkpoint_every", "evaluate_every", "log_every")
# The runs that all others are compared with.
BASES = ("torch", "torch, compiled")
COLUMNS = ("run", "tokens/s", "× torch", "× torch, compiled", "TFLOP/s", "MFU", "peak, MiB", "of torch's",
           "validation loss")  # fmt: skip
LONGEST_COLUMNS = ("run", "longest sequence", "× torch", "its step, s", "bytes a token")


def record_of(runs: Sequence[Path], longest: Path | None) -> Row:
    """Configuration, summary and metrics of every run, by group and name, and the record of the longest sequences.

    Raises:
        ValueError: names the run that is not finished, is given twice, or was measured under other conditions.
    """
    record: Row = {}
    groups: dict[str, dict[str, Row]] = {}
    for directory in runs:
        summary, metrics = read_run(directory)
        config = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        assert isinstance(config, dict)
        shared = {key: summary[key] for key in SHARED}
        record = record or shared
        if shared != record:
            raise ValueError(f"{directory} was measured with {shared}; expected {record}, as {runs[0]}")
        group, name = group_name(config), run_name(summary, config)
        others = groups.setdefault(group, {})
        if name in others:
            raise ValueError(f"{directory} is a second run of {group}: {name}; expected one of each")
        for other in others.values():
            if (steps := summary["steps"]) != (expected := other["summary"]["steps"]):
                raise ValueError(f"{directory} took {steps} steps; expected {expected}, as the others of {group}")
            if differing := _differing(config, other["config"]):
                raise ValueError(f"{directory} differs from the others of {group} in {', '.join(differing)}")
        others[name] = {"config": config, "summary": summary, "metrics": metrics}
    found = {group: {**origin(), "runs": dict(sorted(others.items(), key=_place))} for group, others in groups.items()}
    sequences = None if longest is None else longest_of(longest, record)
    return {**record, "groups": found, "longest_sequences": sequences}


def longest_of(path: Path, record: Row) -> Row:
    """The record of the longest sequences, to stand beside these runs.

    Raises:
        ValueError: it was not measured where they were.
    """
    found = json.loads(path.read_text())
    facts = {key: record.get(key) for key in ("device", "torch", "triton")}
    if not isinstance(found, dict) or any(found.get(key) != fact for key, fact in facts.items()):
        raise ValueError(f"{path} was not measured where the runs were; expected {facts}")
    return {**found, **origin()}


def origin() -> Row:
    """The commit and date of a new measurement."""
    return {"commit": commit(), "date": datetime.now(timezone.utc).date().isoformat()}


def with_kept(record: Row, committed: Row) -> Row:
    """``record``, and the groups that only the ``committed`` one holds.

    Raises:
        ValueError: they were not measured on the same device with the same torch and Triton.
    """
    # Each group names its own commit of this library.
    if differing := [key for key in SHARED if key != "fusedlayers" and record[key] != committed[key]]:
        raise ValueError(f"the committed record was measured with another {', '.join(differing)}; expected no --keep")
    groups = {**committed["groups"], **record["groups"]}
    sequences = record["longest_sequences"] or committed["longest_sequences"]
    return {**record, "groups": dict(sorted(groups.items())), "longest_sequences": sequences}


def _differing(config: Row, other: Row) -> list[str]:
    """The settings, except for layers and loss, in which two runs to be compared differ."""
    found = []
    for part in sorted((config.keys() | other.keys()) - {"layers", "loss"}):
        ours, theirs = config.get(part, {}), other.get(part, {})
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        found += [f"{part}.{name}" for name in names if part != "run" or name not in MAY_DIFFER]
    return found


def group_name(config: Row) -> str:
    """What all runs of a group share: the model, and the number of tokens per step."""
    tokens = config["run"]["batch_size"] * config["model"]["context"]
    vocabulary = config.get("vocabulary", {"kind": "bytes"})
    learned = "" if vocabulary["kind"] == "bytes" else f"vocabulary={vocabulary['kind']}, "
    return f"model={config['model']['name']}, {learned}{tokens:,} tokens a step"


def run_name(summary: Row, config: Row) -> str:
    """What distinguishes a run: its layers and their options."""
    parts = [summary["layers"]]
    if config["layers"]["recompute"] is True and summary["layers"] != BASES[0]:
        workspace = summary.get("FUSEDLAYERS_WORKSPACE_MIB")
        parts.append("recompute" if workspace is None else f"recompute within {workspace} MiB")
    if summary["FUSEDLAYERS_BACKEND"] == "triton" and summary["layers"] != "torch":
        parts.append("kernels forced")
    if loss_of(summary) == "fused":
        parts.append("fused loss, recompute" if config["loss"]["recompute"] else "fused loss")
    if summary["compiled"]:
        parts.append("compiled")
    return ", ".join(parts)


def _place(named: tuple[str, Row]) -> tuple[bool, str]:
    """Sort key: torch's layers first, and compiled runs after eager ones."""
    return not named[0].startswith(BASES[0]), named[0]


def commit() -> str | None:
    """The commit of this clone, None if git does not know it."""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def markdown(record: Row) -> str:
    """The conditions, a table for every model, the picture, and the table of the longest sequences."""
    parts = [_conditions(record)]
    for name, group in record["groups"].items():
        summary = next(iter(group["runs"].values()))["summary"]
        size = f"{summary['parameters']:,} parameters, {summary['steps']} steps"
        parts.append(f"**{name}**: {size} ({origin_of(group)})")
        parts.append(table(COLUMNS, [cells_of(run, group["runs"]) for run in group["runs"]]))
    parts.append(f"![Training losses of all runs]({RECORD.with_suffix('.png').relative_to(ROOT).as_posix()})")
    if record["longest_sequences"] is not None:
        parts += _longest(record["longest_sequences"])
    return "\n\n".join(parts) + "\n"


def draw(record: Row, path: Path) -> None:
    """The training losses of all runs, as a PNG at ``path``."""
    groups = {name: group["runs"] for name, group in record["groups"].items()}
    panels = {name: {run: each["metrics"] for run, each in runs.items()} for name, runs in groups.items()}
    unit = next(iter(next(iter(groups.values())).values()))["summary"]["loss_unit"]
    plots.overlaid_losses(panels, unit, f"Language model on {record['device']}, {record['precision']}", path)


def _conditions(record: Row) -> str:
    runs = [run for group in record["groups"].values() for run in group["runs"].values()]
    known = next((peak_flops(run["summary"]) for run in runs), None)
    peak = "" if known is None else f" of {known / 1e12:.0f}"
    return (
        f"Measured on {record['device']}, {record['precision']}, torch {record['torch']}, Triton {record['triton']} "
        f"(`{RECORD.relative_to(ROOT).as_posix()}`). Whole steps: attention, loss, clipping "
        "and optimizer included, the time of the compiler not. `× torch`: tokens/s over those of `layers=torch`, "
        "launched operation by operation or compiled (`run.compile=true`), above 1 is faster. *TFLOP/s* are those of "
        "the model, forward and backward, without what a kernel computes again, and with the half of causal attention "
        f"that kernels leave out, as usual; *MFU* is their share{peak} in the device's data sheet. *Peak* is the most "
        "that tensors took."
    )


def origin_of(part: Row) -> str:
    """Commit and date of a part of the record."""
    return f"commit {part['commit'][:10]}, {part['date']}" if part["commit"] else part["date"]


def cells_of(name: str, runs: dict[str, Row]) -> tuple[str, ...]:
    """The table's cells for one run of a group, in the order of COLUMNS."""
    summary = runs[name]["summary"]
    ratios = [_ratio(summary, runs, base, "tokens_per_second") for base in BASES]
    speed, flops, peak = summary["tokens_per_second"], summary["model_flops_per_second"], peak_flops(summary)
    return (
        name,
        "not measured" if speed is None else f"{speed:,.0f}",
        *ratios,
        "" if flops is None else f"{flops / 1e12:,.3g}",
        "" if flops is None or peak is None else f"{flops / peak:.1%}",
        f"{summary['peak_memory_bytes'] / 2**20:,.0f}",
        _ratio(summary, runs, BASES[0], "peak_memory_bytes"),
        "" if summary["validation_loss"] is None else f"{summary['validation_loss']:.4f}",
    )


def _ratio(summary: Row, runs: dict[str, Row], base: str, key: str) -> str:
    expected = runs[base]["summary"][key] if base in runs else None
    return f"{summary[key] / expected:.2f}" if summary[key] and expected else ""


def _longest(longest: Row) -> list[str]:
    contenders = longest["contenders"]
    base = contenders[BASES[0]]["length"]
    cells = [
        (
            name,
            f"{step['length']:,}",
            f"{step['length'] / base:.2f}" if base else "",
            f"{step['seconds']:.2f}",
            f"{step['bytes_per_token']:,.0f}",
        )
        if step["length"]
        else (name, "none", "", "", "")
        for name, step in contenders.items()
    ]
    text = (
        f"**Longest sequence** that model={longest['model']} trains in {longest['memory_limit_bytes'] / 2**30:g} GiB "
        f"(multiples of {longest['multiple']:,} tokens; `python -m train_examples.longest_sequence`; "
        f"{origin_of(longest)}):"
    )
    return [text, table(LONGEST_COLUMNS, cells)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: print the tables, or write what they show."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m train_examples.end_to_end", description=description)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run.directory of a finished run")
    parser.add_argument("--longest", type=Path, metavar="JSON", help="record of train_examples.longest_sequence")
    parser.add_argument("--keep", action="store_true", help="what the committed record holds beside these")
    parser.add_argument("--write", action="store_true", help="the record and its picture")
    chosen = parser.parse_args(arguments)
    try:
        committed = json.loads(RECORD.read_text()) if chosen.keep or not chosen.runs else {}
        if chosen.runs:
            record = record_of(chosen.runs, chosen.longest)
            record = with_kept(record, committed) if chosen.keep else record
        else:
            sequences = {"longest_sequences": longest_of(chosen.longest, committed)} if chosen.longest else {}
            record = committed | sequences
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    show(record, RECORD, markdown, draw, writing=chosen.write)


def show(
    record: Row, path: Path, markdown: Callable[[Row], str], draw: Callable[[Row, Path], None], *, writing: bool
) -> None:
    """Print the tables of a record, or write the record and its picture."""
    if not writing:
        print(markdown(record), end="")
        return
    picture = path.with_suffix(".png")
    path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, picture)
    print(f"written: {path}, {picture}")


if __name__ == "__main__":
    main()
