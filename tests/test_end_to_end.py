"""The README's tables of whole runs: made of what runs wrote, and the README shows the committed record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training_runs import traced, train
from train_examples import end_to_end
from train_examples.end_to_end import BLOCK, RECORD, ROOT, markdown, record_of

LONGEST = {
    "model": "small",
    "memory_limit_bytes": 24 * 2**30,
    "multiple": 1024,
    "contenders": {
        "torch": {"length": 2048, "seconds": 0.5, "bytes_per_token": 400.0},
        "fused": {"length": 3072, "seconds": 0.75, "bytes_per_token": 300.0},
        "fused, recompute": {"length": 0},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models; of one of them every kind of run, one of which is too short to be timed."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "torch", "layers=torch")
    train(folder / "fused", "layers=fused")
    train(folder / "recompute", "layers=fused", "layers.recompute=true")
    traced(train, folder / "compiled", "layers=torch")
    train(folder / "other", "layers=torch", "model.name=other", "run.stop_after=2")
    return [folder / name for name in ("torch", "fused", "recompute", "compiled", "other")]


def changed(directory: Path, source: Path, **changes: object) -> Path:
    """A copy of a run with another summary."""
    directory.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (directory / name).write_bytes((source / name).read_bytes())
    summary = json.loads((source / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps({**summary, **changes}))
    return directory


def rows_of(block: str) -> dict[str, list[str]]:
    """The cells of every line of a block's tables, by the first of them."""
    lines = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_a_record_holds_the_runs_and_the_block_shows_them(runs: list[Path], tmp_path: Path) -> None:
    summary = json.loads((runs[0] / "summary.json").read_text())
    measured = {key: summary[key] for key in ("device", "torch", "triton")}
    (tmp_path / "longest.json").write_text(json.dumps(LONGEST | measured))
    record = record_of(runs, tmp_path / "longest.json")
    assert list(record["models"]) == ["tiny", "other"]
    tiny = record["models"]["tiny"]
    assert list(tiny) == ["torch", "torch, compiled", "fused", "fused, recompute"]
    assert [row["step"] for row in tiny["fused"]["metrics"]] == [2, 4, 6, 8, 10, 12]
    block = markdown(record)
    assert "**model=tiny**: 33,280 parameters, 12 steps of 128 tokens" in block
    rows = rows_of(block.partition("**model=other**")[0])
    fused, torch, compiled = (tiny[name]["summary"] for name in ("fused", "torch", "torch, compiled"))
    speed = fused["tokens_per_second"]
    assert rows["fused"][:3] == [
        f"{speed:,.0f}",
        f"{speed / torch['tokens_per_second']:.2f}",
        f"{speed / compiled['tokens_per_second']:.2f}",
    ]
    assert rows["fused"][-1] == f"{fused['validation_loss']:.4f}"
    rows = rows_of(block.partition("**model=other**")[2].partition("**Longest sequence**")[0])
    assert rows["torch"][:3] == ["not measured", "", ""]
    assert "| fused | 3,072 | 1.50 | 0.75 | 300 |" in block
    assert "| fused, recompute | none |  |  |  |" in block


def test_the_share_of_the_peak_and_forced_kernels(runs: list[Path], tmp_path: Path) -> None:
    device = {"device": "NVIDIA H200", "precision": "bf16-mixed", "model_flops_per_second": 98.9e12}
    torch = changed(tmp_path / "torch", runs[0], **device)
    forced = changed(tmp_path / "forced", runs[1], **device, FUSEDLAYERS_BACKEND="triton", compiled=True)
    block = markdown(record_of([torch, forced], None))
    assert "their share of 989 in the device's data sheet" in block
    assert rows_of(block)["fused, kernels forced, compiled"][3:5] == ["98.9", "10.0%"]
    assert "Longest" not in block


def test_runs_that_cannot_stand_side_by_side_are_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch is a second run of model=tiny: torch; expected one of each"):
        record_of([runs[0], runs[0]], None)
    with pytest.raises(ValueError, match=r"device was measured with .*a GPU.*; expected .*CPU"):
        record_of([runs[0], changed(tmp_path / "device", runs[1], device="a GPU")], None)
    with pytest.raises(ValueError, match=r"steps took 4 steps; expected 12, as the others of model=tiny"):
        record_of([runs[0], changed(tmp_path / "steps", runs[1], steps=4)], None)
    other = changed(tmp_path / "batch", runs[1])
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("d_ff: 64", "d_ff: 65").replace("batch_size: 4", "batch_size: 5"))
    with pytest.raises(ValueError, match=r"batch differs from the others of model=tiny in model.d_ff, run.batch_size"):
        record_of([runs[0], other], None)
    (tmp_path / "longest.json").write_text(json.dumps(LONGEST | {"device": "a GPU"}))
    with pytest.raises(ValueError, match=r"longest.json was not measured where the runs were; expected .*CPU"):
        record_of(runs, tmp_path / "longest.json")
    with pytest.raises(SystemExit, match=r"error: .*absent holds no summary.json"):
        end_to_end.main([str(tmp_path / "absent")])
    with pytest.raises(SystemExit):
        end_to_end.main(["--longest", str(tmp_path / "longest.json")])


def test_the_command_writes_record_picture_and_readme(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "ROOT", tmp_path)
    monkeypatch.setattr(end_to_end, "RECORD", tmp_path / "record.json")
    with pytest.raises(SystemExit, match=r"error: .*record.json"):
        end_to_end.main([])
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BLOCK.start}old\n{BLOCK.end}after\n")
    arguments = [str(run) for run in runs]
    end_to_end.main(arguments)
    printed = capsys.readouterr().out
    assert readme.read_text() == f"before\n{BLOCK.start}old\n{BLOCK.end}after\n"
    end_to_end.main([*arguments, "--write"])
    assert BLOCK.shown(readme.read_text()) == printed
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    end_to_end.main([])
    assert capsys.readouterr().out == printed


def test_the_readme_shows_the_committed_record() -> None:
    """Neither without the other."""
    expected = markdown(json.loads(RECORD.read_text())) if RECORD.exists() else "\n"
    readme = (ROOT / "README.md").read_text()
    assert BLOCK.start in readme
    assert BLOCK.end in readme
    assert BLOCK.shown(readme) == expected, "python -m train_examples.end_to_end --write"
    assert RECORD.exists() == RECORD.with_suffix(".png").exists()


def test_a_block_is_written_between_its_comments() -> None:
    readme = f"before\n{BLOCK.start}old\n{BLOCK.end}after\n"
    assert BLOCK.shown(BLOCK.written(readme, "| new |\n")) == "| new |\n"
    with pytest.raises(ValueError, match="expected the lines"):
        BLOCK.written("before\nafter\n", "| new |\n")
