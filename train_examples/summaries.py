"""What a finished run wrote, and what its device's data sheet promises."""

from __future__ import annotations

import json
from pathlib import Path

from train_examples.loop import Row, read_metrics

# FLOP/s of one device in 16 bits, dense, by its data sheet.
PEAKS = {"NVIDIA H200": 989e12}


def peak_flops(summary: Row) -> float | None:
    """FLOP/s that the data sheet promises for all devices of a run together, None where that is not known here."""
    peak = PEAKS.get(summary["device"]) if summary["precision"] in ("bf16-mixed", "16-mixed") else None
    return None if peak is None else peak * summary.get("processes", 1)


def loss_of(summary: Row) -> str:
    """Who computed the loss head; the logits of runs without a word of it were torch's."""
    return summary.get("loss", "torch")


def read_run(directory: Path) -> tuple[Row, list[Row]]:
    """Summary and metrics of a finished run.

    Raises:
        ValueError: names the directory that holds no finished run.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        rows = read_metrics(directory / "metrics.jsonl")
    except OSError:
        raise ValueError(f"{directory} holds no summary.json; expected the run.directory of a finished run") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory}: summary.json or metrics.jsonl is no JSON: {error}") from error
    # Three that every summary has.
    if not isinstance(summary, dict) or not {"example", "layers", "device"} <= summary.keys():
        raise ValueError(f"{directory}: summary.json is not that of a run of these examples")
    return summary, rows
