"""The table of training steps on a GPU in the documentation, from the record of ``tests.models.device_table``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.layer_tables import other_commits
from tests.models.device_table import TORCH, Row
from tests.models.small import FAMILIES
from train_examples.tables import table

RECORD = Path(__file__).resolve().parent / "results" / "h200-bf16.json"
COLUMNS = (
    "family", "its FFN", "logits: torch / fused", "gradients: torch / fused", "step, ms: torch",
    "speed-up: fused / recompute", "kept, MiB: torch / fused / recompute", "peak, MiB: torch / fused / recompute",
)  # fmt: skip
FUSED, RECOMPUTE = "auto", "recompute"
KINDS = (TORCH, FUSED, RECOMPUTE)
NOT_TIMED = "not timed"


def markdown(record: Row) -> str:
    """The paragraph about how it was measured, and the table, families in the order of ``small.FAMILIES``."""
    rows = {row["family"]: row for row in record["rows"]}
    cells = [_cells(rows[name]) for name in FAMILIES if name in rows]
    return f"{_conditions(record)}\n\n{table(COLUMNS, cells)}\n"


def _conditions(record: Row) -> str:
    device, versions = record["device"], record["versions"]
    commits = ", ".join([f"commit {record['commit'][:10]}", *other_commits(record["rows"])])
    timed = all(_is_timed(entry) for row in record["rows"] for entry in row["contenders"].values())
    reason = "a check before it was not green, because of the tiles of 64 x 64 elements that the record names"
    untimed = "" if timed else f"; *{NOT_TIMED}*: {reason}"
    return (
        f"Measured on {device['name']}, torch {versions['torch']}, Triton {versions['triton']}, bfloat16, "
        f"{record['started'][:10]}, {commits}: one layer (T5, BART and Whisper: one of each side; CLIP, SigLIP and "
        "ConvNeXt: all of them) with its library's default widths, a training step of 8,192 tokens from width 2048 on "
        "and of about 65,536 below. Errors are the largest ones over the largest value, against float64. *Fused* is "
        "auto mode, *recompute* is `recompute=True`; speed-ups are of the whole step, attention and loss included, "
        "launched call by call (`*`: the host sets the pace), above 1 where faster than "
        f"torch{untimed}. *Kept* is what the forward pass keeps for the backward pass, *peak* the most that a step "
        "allocates, gradients included."
    )


def _cells(row: Row) -> tuple[str, ...]:
    contenders = row["contenders"]
    errors = [
        " / ".join(f"{contenders[kind][key]:.1e}" for kind in (TORCH, FUSED))
        for key in ("logits_error", "gradients_error")
    ]
    memory = [
        " / ".join(_mebibytes(contenders[kind].get(key)) for kind in KINDS) for key in ("saved_bytes", "peak_bytes")
    ]
    speed_ups = " / ".join(_speed_up(contenders, kind) for kind in (FUSED, RECOMPUTE))
    ffn = row["ffn"]
    step = f"{1e3 * contenders[TORCH]['launched']['median']:.1f}{_mark(contenders[TORCH])}"
    return (row["family"], ffn, *errors, step, speed_ups, *memory)


def _speed_up(contenders: Row, kind: str) -> str:
    if not _is_timed(contenders[kind]):
        return NOT_TIMED
    ratio = contenders[TORCH]["launched"]["median"] / contenders[kind]["launched"]["median"]
    return f"{ratio:.2f}{_mark(contenders[kind])}"


def _is_timed(entry: Row) -> bool:
    return "launched" in entry


def _mark(entry: Row) -> str:
    return "\\*" if entry["host_bound"] else ""


def _mebibytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**20:,.0f}"
