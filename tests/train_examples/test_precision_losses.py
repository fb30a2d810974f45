"""The table of loss curves in 8 bits is made of what runs wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training_runs import train
from train_examples import precision_losses
from train_examples.precision_losses import draw, markdown, record_of
from train_examples.rules import SettingsError
from train_examples.settings import LayerSettings, ModelSettings
from train_examples.transformer import feed_forward

OPTIONS = ("layers=fused", "run.evaluate_every=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds in 16 bits, and one of them with ``layers.precision``."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "first", *OPTIONS)
    train(folder / "second", *OPTIONS, "run.seed=1")
    train(folder / "fp8", *OPTIONS, "layers.precision=fp8")
    return [folder / name for name in ("first", "second", "fp8")]


def test_curves_are_grouped_by_precision_and_seed(runs: list[Path], tmp_path: Path) -> None:
    record = record_of(runs)
    assert [list(seeds) for seeds in record["runs"].values()] == [["0", "1"], ["0"]]
    assert list(record["runs"]) == ["16 bits", "fp8"]
    final = [json.loads((run / "summary.json").read_text())["validation_loss"] for run in runs]
    text = markdown(record)
    assert f"| 16 bits | {final[0]:.4f}, {final[1]:.4f} |" in text
    assert f"| fp8 | {final[2]:.4f} |" in text
    draw(record, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_runs_that_cannot_be_compared_are_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="second run in 16 bits with seed 0"):
        record_of([runs[0], runs[0]])
    with pytest.raises(ValueError, match=r"expected runs without layers\.precision"):
        record_of([runs[2]])
    train(tmp_path / "slow", *OPTIONS, "optim.learning_rate=1e-4")
    with pytest.raises(ValueError, match=r"slow differs from .* in config"):
        record_of([runs[0], tmp_path / "slow"])
    with pytest.raises(SystemExit, match=r"error: .*absent"):
        precision_losses.main([str(tmp_path / "absent")])


def test_the_command_writes_what_it_prints_later(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision_losses, "ROOT", tmp_path)
    monkeypatch.setattr(precision_losses, "RECORD", tmp_path / "record.json")
    precision_losses.main(list(map(str, runs)))
    printed = capsys.readouterr().out
    precision_losses.main([*map(str, runs), "--write"])
    capsys.readouterr()
    precision_losses.main([])
    assert capsys.readouterr().out == printed


def test_layers_precision_reaches_the_layers(tmp_path: Path) -> None:
    model = ModelSettings("one", 32, 64, layers=1, heads=1, context=8)
    assert feed_forward(model, LayerSettings("fused", precision="rowwise")).precision == "rowwise"
    assert feed_forward(model, LayerSettings("fused")).precision is None
    for options, text in (
        (("layers=fused", "layers.precision=fp4"), "layers.precision is 'fp4'; expected null, fp8, rowwise"),
        (("layers=torch", "layers.precision=fp8"), "layers.precision is fp8; expected null with layers=torch"),
        (("layers=fused", "layers.precision=fp8", "parallel=tp"), "expected null with parallel=tp"),
    ):
        with pytest.raises(SettingsError, match=text):
            train(tmp_path / "wrong", *options)
