"""The tables of whole runs are made of what runs wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training_runs import traced, train
from train_examples import end_to_end
from train_examples.end_to_end import RECORD, markdown, record_of

TINY = "model=tiny, 128 tokens a step"
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
    assert list(record["groups"]) == [TINY, "model=other, 128 tokens a step"]
    tiny = record["groups"][TINY]["runs"]
    assert list(tiny) == ["torch", "torch, compiled", "fused", "fused, recompute"]
    assert [row["step"] for row in tiny["fused"]["metrics"]] == [2, 4, 6, 8, 10, 12]
    block = markdown(record)
    assert f"**{TINY}**: 33,280 parameters, 12 steps (" in block
    rows = rows_of(block.partition("**model=other")[0])
    fused, torch, compiled = (tiny[name]["summary"] for name in ("fused", "torch", "torch, compiled"))
    speed = fused["tokens_per_second"]
    assert rows["fused"][:3] == [
        f"{speed:,.0f}",
        f"{speed / torch['tokens_per_second']:.2f}",
        f"{speed / compiled['tokens_per_second']:.2f}",
    ]
    assert rows["fused"][-1] == f"{fused['validation_loss']:.4f}"
    rows = rows_of(block.partition("**model=other")[2].partition("**Longest sequence**")[0])
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


def test_a_run_is_named_after_its_workspace(runs: list[Path], tmp_path: Path) -> None:
    roomy = changed(tmp_path / "roomy", runs[2], FUSEDLAYERS_WORKSPACE_MIB="256")
    record = record_of([runs[2], roomy], None)
    assert list(record["groups"][TINY]["runs"]) == ["fused, recompute", "fused, recompute within 256 MiB"]


def test_runs_that_cannot_stand_side_by_side_are_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"torch is a second run of {TINY}: torch; expected one of each"):
        record_of([runs[0], runs[0]], None)
    with pytest.raises(ValueError, match=r"device was measured with .*a GPU.*; expected .*CPU"):
        record_of([runs[0], changed(tmp_path / "device", runs[1], device="a GPU")], None)
    with pytest.raises(ValueError, match=r"steps took 4 steps; expected 12, as the others of model=tiny, 128"):
        record_of([runs[0], changed(tmp_path / "steps", runs[1], steps=4)], None)
    other = changed(tmp_path / "other", runs[1])
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("d_ff: 64", "d_ff: 65").replace("seed: 0", "seed: 1"))
    with pytest.raises(ValueError, match=rf"other differs from the others of {TINY} in model.d_ff, run.seed"):
        record_of([runs[0], other], None)
    (tmp_path / "longest.json").write_text(json.dumps(LONGEST | {"device": "a GPU"}))
    with pytest.raises(ValueError, match=r"longest.json was not measured where the runs were; expected .*CPU"):
        record_of(runs, tmp_path / "longest.json")
    (tmp_path / "longest.json").write_text("[]")
    with pytest.raises(ValueError, match=r"longest.json was not measured where the runs were; expected .*CPU"):
        record_of(runs, tmp_path / "longest.json")
    with pytest.raises(SystemExit, match=r"error: .*absent holds no summary.json"):
        end_to_end.main([str(tmp_path / "absent")])
    with pytest.raises(SystemExit, match=r"longest.json was not measured where the runs were; expected .*H200"):
        end_to_end.main(["--longest", str(tmp_path / "longest.json")])


def test_the_command_writes_record_and_picture(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "ROOT", tmp_path)
    monkeypatch.setattr(end_to_end, "RECORD", tmp_path / "record.json")
    with pytest.raises(SystemExit, match=r"error: .*record.json"):
        end_to_end.main([])
    arguments = [str(run) for run in runs]
    end_to_end.main(arguments)
    printed = capsys.readouterr().out
    assert not end_to_end.RECORD.exists()
    end_to_end.main([*arguments, "--write"])
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    end_to_end.main([])
    assert capsys.readouterr().out == printed
    # The longest sequences may be measured apart from the runs.
    measured = {key: json.loads(end_to_end.RECORD.read_text())[key] for key in ("device", "torch", "triton")}
    (tmp_path / "longest.json").write_text(json.dumps(LONGEST | measured))
    end_to_end.main(["--longest", str(tmp_path / "longest.json")])
    shown = capsys.readouterr().out
    assert shown.startswith(printed.rstrip("\n"))
    assert "**Longest sequence**" in shown


def test_what_is_measured_anew_replaces_its_group_and_the_rest_can_be_kept(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "ROOT", tmp_path)
    monkeypatch.setattr(end_to_end, "RECORD", tmp_path / "record.json")
    first = record_of(runs, None)
    # As another commit, of another release, left it.
    first["fusedlayers"] = "0.0.1"
    for group in first["groups"].values():
        group.update(commit="0123456789abcdef", date="2026-01-01")
    end_to_end.RECORD.write_text(json.dumps(first))
    end_to_end.main([str(runs[0]), "--keep"])
    tiny, other = capsys.readouterr().out.split("**model=")[2:0:-1]
    assert tiny.startswith("tiny, 128 tokens")
    assert list(rows_of(tiny)) == ["run", "---", "torch"]
    assert "2026-01-01" not in tiny
    assert "(commit 0123456789, 2026-01-01)" in other
    end_to_end.RECORD.write_text(json.dumps({**first, "torch": "1.0"}))
    with pytest.raises(SystemExit, match="measured with another torch; expected no --keep"):
        end_to_end.main([str(runs[0]), "--keep"])


def test_the_committed_record_has_its_picture() -> None:
    assert RECORD.exists()
    assert RECORD.with_suffix(".png").exists()
