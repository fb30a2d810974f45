"""Reads what a finished run wrote, and the peak rates of data sheets."""

from __future__ import annotations

import json
from pathlib import Path

from train_examples.loop import Row, read_metrics

# Dense 16-bit FLOP/s of one device, from its data sheet.
PEAKS = {"NVIDIA H200": 989e12}


def peak_flops(summary: Row) -> float | None:
    """Data-sheet FLOP/s of all devices of a run together, None if unknown here."""
    peak = PEAKS.get(summary["device"]) if summary["precision"] in ("bf16-mixed", "16-mixed") else None
    return None if peak is None else peak * summary.get("processes", 1)


def loss_of(summary: Row) -> str:
    """Who computed the loss head; "torch" in runs that do not record it."""
    return summary.get("loss", "torch")


def read_run(directory: Path) -> tuple[Row, list[Row]]:
    """Summary and metrics of a finished run.

    Raises:
        ValueError: names the directory without a finished run.
    """
    try:
        summary = json.loads((directory / "summary.json").read_text())
        rows = read_metrics(directory / "metrics.jsonl")
    except OSError:
        raise ValueError(f"{directory} holds no summary.json; expected the run.directory of a finished run") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory}: summary.json or metrics.jsonl is no JSON: {error}") from error
    # Three keys of every summary.
    if not isinstance(summary, dict) or not {"example", "layers", "device"} <= summary.keys():
        raise ValueError(f"{directory}: summary.json is not that of a run of these examples")
    return summary, rows
