"""Every picture shows all of its text: what the committed results are drawn as, and the pictures of the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages, records
from train_examples import comparison, end_to_end, plots

figures = pytest.importorskip("matplotlib.figure")

RECORDS = sorted(pages.RESULTS.rglob("*.json"))
# Of random sizes and products in 8 bits there are tables alone, and the times of paths are one picture together.
DRAWN = [path for path in RECORDS if path.parent.name not in ("drawn", "float8", "paths")]
# The pictures of a folder show the same of several cards: the newest's are enough.
NEWEST = {path.parent: path for path in sorted(DRAWN, key=lambda path: json.loads(path.read_text())["started"])}


def cut_off(figure: Any) -> list[str]:
    """On which sides the tight box of a figure, as it is drawn, sticks out of the canvas, and by how many inches."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    # A line of a frame may be half a pixel outside.
    sides = {"left": -box.x0, "right": box.x1 - width, "bottom": -box.y0, "top": box.y1 - height}
    return [f"{side}: {by:.2f}" for side, by in sides.items() if by > 0.01]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all pictures of a test, each of which is looked at when it is saved."""
    names: list[str] = []

    def looked_at(figure: Any, path: Path, **options: object) -> None:
        # Where everything stands is known without a picture; other tests look at files that are written.
        names.append(Path(path).name)
        assert not cut_off(figure), path

    monkeypatch.setattr(figures.Figure, "savefig", looked_at)
    return names


@pytest.mark.parametrize(
    "record",
    [pytest.param(path, marks=() if path in NEWEST.values() else pytest.mark.full) for path in DRAWN],
    ids=[f"{path.parent.name} {path.stem}" for path in DRAWN],
)
def test_the_pictures_of_the_benchmark(record: Path, tmp_path: Path, saved: list[str]) -> None:
    records.draw(json.loads(record.read_text()), tmp_path / record.name)
    assert saved


def test_the_other_pictures_of_results(tmp_path: Path, saved: list[str]) -> None:
    pages.draw(tmp_path / "whole-models.png")
    end_to_end.draw(json.loads(end_to_end.RECORD.read_text()), tmp_path / "end-to-end.png")
    assert len(saved) > 1


# As long as the names of runs get.
LONGEST = {"layers": "replaced", "loss": "fused", "compiled": True}
CPU = {"device": "CPU, 16 threads", "precision": "32-true", "peak_memory_source": "resident size of the process"}
KEPT = {"kept_bytes": 123_456_789}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes", [{}, CPU, {**CPU, **KEPT}, {**CPU, **KEPT, **LONGEST}], ids=["GPU", "CPU", "kept", "long"]
)
@pytest.mark.parametrize("scores", [None, {"recall_at_10": 0.5, "mrr": 0.25}], ids=["losses", "scores"])
def test_the_pictures_of_the_examples(
    changes: dict[str, object], scores: dict[str, float] | None, tmp_path: Path, saved: list[str]
) -> None:
    runs = next(iter(json.loads(end_to_end.RECORD.read_text())["groups"].values()))["runs"]
    for name in ("torch", "fused"):
        (tmp_path / name).mkdir()
        summary = {**runs[name]["summary"], **(changes if name == "fused" else {**changes, "layers": "torch"})}
        summary["references"] = {"TF-IDF (scikit-learn)": scores} if scores else {}
        rows = [{**row, "scores": scores if row["validation_loss"] else None} for row in runs[name]["metrics"]]
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        title = f"{summary['example'].replace('_', ' ').capitalize()}, layers={summary['layers']}"
        plots.loss_curve(rows, title, summary["loss_unit"], tmp_path / "loss.png")
        plots.score_curves(rows, summary["references"], title, tmp_path / "scores.png")
    comparison.main([str(tmp_path / "torch"), str(tmp_path / "fused"), "--output", str(tmp_path / "both.png")])
    times = {"torch": 40.0, "split_k=auto": 35.0, "S = 1": 275.0, "S = 2": 140.0, "S = 32": 20.5}
    plots.split_factors(times, "128 × 64 × 65,536 on NVIDIA H200, bfloat16", tmp_path / "split.png")
    assert saved == ["loss.png", "scores.png"] * 2 + ["both.png", "split.png"]


def test_a_text_that_sticks_out_is_found() -> None:
    figure = figures.Figure(layout="constrained")
    figure.subplots()
    figure.suptitle("as long as a title must not be " * 5)
    assert [side.partition(":")[0] for side in cut_off(figure)] == ["left", "right"]
