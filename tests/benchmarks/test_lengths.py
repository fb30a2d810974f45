"""Peak memory over the length of a text: the rows of a record, its table and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import lengths, records
from benchmarks.step_models import LIGER, NORM, STEP_MODELS, TORCH, Variant, variants
from fusedlayers.bench.record import Record

CPU = torch.device("cpu")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Two lengths of a small model, whose peaks a CPU does not know: they are made up."""
    pytest.importorskip("transformers")
    ours = variants

    def without_liger(plain: torch.nn.Module, names: tuple[str, ...]) -> dict[str, Variant]:
        found = ours(plain, [name for name in names if name != LIGER])
        return found | {LIGER: Variant(None, "not installed")}

    monkeypatch.setattr(lengths, "variants", without_liger)
    rows = [lengths.measured(STEP_MODELS["llama-256"].small(), length, "fp32", CPU, seed=0) for length in (8, 24)]
    assert all(entry["peak_bytes"] is None for row in rows for entry in row["contenders"].values())
    for row in rows:
        row["held_bytes"] = 2**30
        row["contenders"][TORCH]["peak_bytes"] = row["shape"][0] * 2**29
        row["contenders"][NORM]["peak_bytes"] = row["shape"][0] * 2**28
    return {
        "rows": rows, "started": "2026-01-02T00:00:00", "commit": "0123456789ab",
        "versions": {"torch": "2.11.0", "triton": None}, "device": {"name": "a GPU"},
    }  # fmt: skip


def test_a_record_has_a_row_for_each_length(record: Record) -> None:
    first, second = record["rows"]
    assert (first["sizes"]["batch"], second["sizes"]["length"]) == (1, 24)
    assert {name: entry["reason"] for name, entry in first["contenders"].items()} == {
        LIGER: "not installed", TORCH: "only its memory was measured", NORM: "only its memory was measured"
    }  # fmt: skip
    table = lengths.table(record)
    assert table.columns == ("tokens", "torch", "Liger", "fusedlayers")
    assert table.rows == (("8", "5.0", "–", "3.0"), ("24", "13.0", "–", "7.0"))
    assert "Measured on a GPU, torch 2.11.0" in records.markdown(record)


def test_the_picture(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records.draw(record, tmp_path / "lengths.json")
    assert (tmp_path / "lengths.png").stat().st_size > 10_000


def test_what_does_not_fit_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def too_much(step: lengths.Step) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lengths.Step, "run", too_much)
    monkeypatch.setattr(lengths, "CONTENDERS", (TORCH,))
    row = lengths.measured(STEP_MODELS["llama-256"].small(), 8, "fp32", CPU, seed=0)
    assert row["contenders"][TORCH]["reason"] == "it takes more memory than there is"
    assert row["contenders"][TORCH]["peak_bytes"] is None


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lengths.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
