"""A GPU's results, from the committed record, for a comparison on a machine without one."""

from __future__ import annotations

import json

from fusedlayers import planning
from fusedlayers.kernels.activations import canonical_activation
from fusedlayers.planning import Problem
from train_examples.end_to_end import COLUMNS, RECORD, ROOT, cells_of, origin_of
from train_examples.loop import Row
from train_examples.settings import ModelSettings
from train_examples.tables import aligned

# The device of the record, as planning knows it.
MEASURED = planning.card("H200")
# The columns that matter when layers are compared; the page of results shows the others, too.
SHOWN = [column for column in COLUMNS if column not in ("TFLOP/s", "MFU")]


def bytes_kept(model: ModelSettings, tokens: int, recompute: bool | str) -> tuple[int, int]:
    """Bytes per token that (torch, fused layers) save for the backward pass of one feed-forward block, in bfloat16, as
    planned for a step of ``tokens`` on the device of the record."""
    problem = Problem(
        operation="ffn", batch=1, M=tokens, K=model.d_model, N=model.d_ff, O=model.d_model, dtype="bfloat16",
        activation=canonical_activation(model.activation), gated=model.gated, dropout=model.dropout > 0,
        needs_data_gradient=True, needs_weight_gradient=True, recompute=recompute,
    )  # fmt: skip
    plan = planning.plan(problem, MEASURED, "auto")
    return problem.kept_by_torch(MEASURED) // tokens, plan.saved_bytes // tokens


def text() -> str:
    """The tables of the committed record, each with the bytes that its feed-forward blocks save."""
    record = json.loads(RECORD.read_text())
    versions = f"{record['precision']}, torch {record['torch']}, Triton {record['triton']}"
    parts = [f"Measured on an {record['device']} ({versions}; {RECORD.relative_to(ROOT).as_posix()}):"]
    for name, group in record["groups"].items():
        parts.append(f"{name} ({origin_of(group)})\n{_kept(group)}\n{aligned(_cells(group['runs']))}")
    return "\n\n".join(parts)


def _cells(runs: dict[str, Row]) -> list[list[str]]:
    every = [COLUMNS, *(cells_of(name, runs) for name in runs)]
    return [[cell for column, cell in zip(COLUMNS, row, strict=True) if column in SHOWN] for row in every]


def _kept(group: Row) -> str:
    """One sentence on the memory that the backward pass of the feed-forward blocks needs."""
    config = next(iter(group["runs"].values()))["config"]
    model, tokens = ModelSettings(**config["model"]), config["run"]["batch_size"] * config["model"]["context"]
    torchs, fused = bytes_kept(model, tokens, recompute="auto")
    _, least = bytes_kept(model, tokens, recompute=True)
    return (
        f"As auto mode plans it now, a feed-forward block keeps {torchs:,} bytes a token with torch, {fused:,} with "
        f"fused layers, {least:,} with layers.recompute=true."
    )
