"""The sweep over the split factor: what its table and its picture are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sweep
from fusedlayers.bench.contenders import EAGER


def row() -> dict[str, Any]:
    names = [EAGER, *(f"S = {split_k}" for split_k in (*sweep.SPLITS, "auto"))]
    entry = {"microseconds": 12.34, "reason": "", "max_error": 1.5e-2, "rms_error": 2e-3}
    entries = {name: dict(entry) for name in names}
    entries["S = 256"] |= {"microseconds": None, "reason": "out of memory"}
    return {"case": "split_k_sweep", "shape": [64, 64, 65536], "dtype": "bf16", "entries": entries}


def test_table() -> None:
    table = sweep.table(row())
    assert table.title == "64×64×65536, bf16"
    assert table.columns == ("split", "µs", "max error", "RMS error")
    assert table.rows[0] == ("torch eager", "12.3", "1.50e-02", "2.00e-03")
    assert {line[0]: line[1] for line in table.rows}["S = 256"] == "–"


def test_errors_are_shares_of_the_root_mean_square() -> None:
    truth = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    largest, rms = sweep._errors(torch.tensor([2.0, -2.0, 2.0, -1.0]), truth)
    assert (largest, rms) == (0.5, pytest.approx(0.25))


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra examples")
    record = {
        "rows": [row(), row()],
        "device": {"name": "a GPU"},
        "versions": {"torch": "2.11"},
        "started": "2026-01-01T00:00:00",
    }
    [target] = sweep.plot(record, tmp_path / "record.json")
    assert target == tmp_path / "record.png"
    assert target.stat().st_size > 1000


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main([]) == 1
    assert "needs a GPU" in capsys.readouterr().err
