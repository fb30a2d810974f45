"""The picture of a record of whole training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_tables
from benchmarks.step_models import LIGER, NORM, TORCH
from fusedlayers.bench import record


def timed(milliseconds: float, peak: int) -> dict[str, Any]:
    return {"status": "timed", "launched": {"median": milliseconds / 1e3}, "peak_bytes": peak}


def row(model: str, mode: str, **contenders: Any) -> dict[str, Any]:
    shared = {"title": model.upper(), "dtype": "bf16", "held_bytes": 1}
    return {**shared, "grid": model, "direction": mode, "contenders": contenders}


def test_it_shows_multiples_of_torch_in_the_first_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    eager = row("bert", "eager", **{TORCH: timed(10, 3), NORM: timed(8, 1)})
    compiled = {TORCH: timed(7, 3), LIGER: record.untimed_entry("eager alone")}
    found = {
        # A model that was timed compiled alone has no yardstick.
        "rows": [eager, row("bert", "compile", **compiled), row("gpt2", "compile", **compiled)],
        "device": {"name": "a GPU"}, "versions": {"torch": "2.11"}, "started": "2026-01-01T00:00:00",
    }  # fmt: skip
    drawn: list[Any] = []
    draw = step_tables.bar_picture
    monkeypatch.setattr(step_tables, "bar_picture", lambda *given: drawn.append(given) or draw(*given))
    [picture] = step_tables.plot(found, tmp_path / "steps.json")
    assert picture.stat().st_size > 10_000
    [(titles, panels, colours)] = drawn
    assert titles == ["BERT"]
    assert panels["time of a step"] == [pytest.approx({"torch": 1, "torch, compiled": 0.7, "fusedlayers": 0.8})]
    assert panels["peak memory"] == [pytest.approx({"torch": 1, "torch, compiled": 1, "fusedlayers": 0.5})]
    assert colours["torch, compiled"] < colours["torch"]
