"""The classifier of packages: the scores are right, and both kinds of layers learn alike."""

from __future__ import annotations

import itertools
import json
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.closeness import assert_close
from tests.support.training_runs import (
    TINY_CLASSIFIER,
    band_width,
    classifier_settings,
    distance,
    train_classifier,
)
from tests.train_examples.conftest import PACKAGES
from train_examples import comparison, package_classifier, plots, split_factor
from train_examples.hashed_features import HashedFeatures, dense_rows, linear_predictions
from train_examples.package_classifier import PackageClassifier
from train_examples.rules import SettingsError
from train_examples.scores import accuracy_scores, majority_scores, score_table
from train_examples.settings import ClassifierSettings, LayerSettings


def test_features_by_hand() -> None:
    texts = ["readLine(x)", "readLine(y)", "if x"]
    hashed = HashedFeatures(texts, 2**16, 2, scale=3.0)
    assert hashed.tokens(texts) == 5 + 5 + 2
    rows = hashed.rows(hashed.matrix(texts))
    # Words and signs, and pairs of neighbours: read, Line, (, x, ), four pairs; if, x, one pair.
    assert rows.starts.diff().tolist() == [9, 9, 3]
    for start, end in itertools.pairwise(rows.starts.tolist()):
        torch.testing.assert_close(rows.values[start:end].norm(), torch.tensor(3.0))
    # The rarer of the two, x is in two texts of three and if in one, weighs more.
    weights = rows.values[rows.starts[2] :].unique()
    assert len(weights) == 2


def test_rows_are_taken_as_their_dense_form_says() -> None:
    texts = ["a b a", "", "c d e f g", "a", "h i"]
    hashed = HashedFeatures(texts, 64, 1, scale=2.0)
    matrix = hashed.matrix(texts)
    samples = torch.tensor([3, 1, 2, 2, 0])
    entries = hashed.rows(matrix).take(samples)
    expected = torch.from_numpy(2.0 * matrix.toarray()[samples.numpy()])
    torch.testing.assert_close(dense_rows(*entries, (5, 64)), expected.float())
    rounded = dense_rows(*entries, (5, 64), torch.bfloat16)
    assert torch.equal(rounded, expected.float().bfloat16())


def test_the_baseline_finds_what_a_line_can_separate() -> None:
    texts = ["alpha beta", "alpha gamma", "delta beta", "delta gamma"] * 5
    hashed = HashedFeatures(texts, 256, 1, scale=1.0)
    labels = torch.tensor([0, 0, 1, 1] * 5)
    matrix = hashed.matrix(texts)
    other = hashed.matrix(["delta", "alpha"])
    validated, predicted = linear_predictions(matrix, labels, matrix, labels, [other])
    assert torch.equal(validated, labels)
    assert predicted.tolist() == [1, 0]


def test_scores_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    reached = accuracy_scores(torch.tensor([0, 0, 1, 1, 0]), labels)
    assert reached == pytest.approx({"accuracy": 3 / 5, "balanced_accuracy": (2 / 3 + 1 + 0) / 3})
    majority = majority_scores(torch.tensor([2, 1, 2]), labels)
    assert majority == pytest.approx({"accuracy": 1 / 5, "balanced_accuracy": 1 / 3})
    table = score_table({"trained": reached, "majority class": majority})
    assert [line.split()[-2:] for line in table] == [
        ["accuracy", "balanced_accuracy"],
        ["0.600", "0.556"],
        ["0.200", "0.333"],
    ]
    assert len({len(line) for line in table}) == 1


def test_the_model_is_a_linear_layer_of_dense_rows() -> None:
    chosen = ClassifierSettings(name="test", features=64, scale=1.0, hidden=8, dropout=0.0)
    hashed = HashedFeatures(["a b c", "d e"], 64, 2, scale=1.0)
    matrix = hashed.matrix(["b c a", "e f"])
    entries = hashed.rows(matrix).take(torch.arange(2))
    dense = torch.from_numpy(matrix.toarray())
    for kind in ("torch", "fused"):
        model = PackageClassifier(chosen, LayerSettings(kind=kind), packages=3)

        def by_hand(x: Tensor, model: PackageClassifier = model) -> Tensor:
            wide, head = ((layer.weight.to(x.dtype), layer.bias.to(x.dtype)) for layer in (model.wide, model.head))
            return F.linear(F.relu(F.linear(x, *wide)), *head)

        assert_close(model(*entries, 2), by_hand(dense.float()), by_hand(dense), f"logits, {kind}")


def test_both_kinds_of_layers_start_equal(tmp_path: Path) -> None:
    states = []
    for layers in ("torch", "fused"):
        chosen = classifier_settings(tmp_path, f"layers={layers}")
        torch.manual_seed(3)
        states.append(PackageClassifier(chosen.classifier, chosen.layers, 5).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("layers", ["fused", "torch"])
def test_a_run_learns_and_writes_everything(layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = train_classifier(
        tmp_path, f"layers={layers}", "run.steps=60", "run.batch_size=32", in_short=layers != "fused"
    )
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    measured = [row["step"] for row in rows if row["scores"] is not None]
    assert measured == [row["step"] for row in rows if row["validation_loss"] is not None] == list(range(4, 61, 4))
    names = {"config.yaml", "metrics.jsonl", "loss.png", "scores.png", "checkpoint.pt", "sample.txt", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for picture in ("loss.png", "scores.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["layers"] == layers
    assert set(summary["references"]) == set(summary["test_references"]) == {"linear", "majority", "chance"}
    assert list(summary["test_scores"]) == ["accuracy", "balanced_accuracy"]
    assert summary["test_references"]["chance"]["accuracy"] == 1 / len(PACKAGES)
    for score in ("accuracy", "balanced_accuracy"):
        assert summary["test_scores"][score] > summary["test_references"]["majority"][score]
        assert summary["test_references"]["linear"][score] > summary["test_references"]["majority"][score]
    sample = (tmp_path / "sample.txt").read_text()
    assert f"{summary['test_scores']['accuracy']:.3f}" in sample
    assert sample.count("linear: ") == 5
    assert split_factor.REASON in capsys.readouterr().out


@pytest.mark.usefixtures("packages")
def test_a_checkpoint_of_other_features_is_refused(tmp_path: Path) -> None:
    train_classifier(tmp_path, "run.stop_after=4")
    with pytest.raises(SettingsError, match=r"another model.*classifier.n_gram is 2 there and 1 here"):
        train_classifier(tmp_path, "run.resume=auto", "classifier.n_gram=1")


PARITY = (
    "run.log_every=1",
    "run.steps=15",
    "run.evaluate_every=15",
    "run.checkpoint_every=15",
    "classifier.dropout=0",
    # Large steps lift the band clear of the last bit of a loss.
    "optim.learning_rate=2e-2",
)
# Into how many parts the inputs of the wide layer are cut: each is another order of summation.
REORDERINGS = (2, 5, 16)


def parity_losses(directory: Path, *overrides: str) -> list[float]:
    return [row["train_loss"] for row in train_classifier(directory, *PARITY, *overrides)]


def reordered_linear(chosen: ClassifierSettings, layers: LayerSettings) -> nn.Linear:
    return Reordered(chosen.features, chosen.hidden)


class Reordered(nn.Linear):
    """``nn.Linear`` in parts that are summed one after the other, forward; its weight gradient over rows likewise."""

    ranges = 1

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for rows in x.chunk(self.ranges):
            partials = zip(rows.chunk(self.ranges, dim=1), self.weight.chunk(self.ranges, dim=1), strict=True)
            outputs.append(sum(F.linear(*partial) for partial in partials) + self.bias)
        return torch.cat(outputs)


@pytest.fixture(scope="module")
def torch_band(few_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], float]:
    """Training losses of torch runs that differ in the order of one sum, and the largest distance between two."""
    folder = tmp_path_factory.mktemp("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(few_packages))
        curves = [parity_losses(folder / "torch", "layers=torch")]
        patch.setattr(package_classifier, "wide_linear", reordered_linear)
        for ranges in REORDERINGS:
            patch.setattr(Reordered, "ranges", ranges)
            curves.append(parity_losses(folder / f"reordered{ranges}", "layers=torch"))
    return curves, band_width(curves)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("backend", "split_k"),
    [
        pytest.param("torch", "auto", marks=pytest.mark.full, id="torch path"),
        pytest.param("triton", "3", marks=pytest.mark.interpreter, id="kernels"),
    ],
)
def test_fused_layers_stay_within_the_band_of_torch_runs(
    backend: str,
    split_k: str,
    torch_band: tuple[list[list[float]], float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves, band = torch_band
    assert band > 0, "the orders of summation make no difference, so the band would prove nothing"
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    fused = parity_losses(tmp_path / "fused", "layers=fused", f"layers.split_k={split_k}")
    assert min(distance(fused, curve) for curve in curves) <= band


@pytest.mark.usefixtures("packages")
def test_the_band_is_too_narrow_for_other_features(torch_band: tuple[list[list[float]], float], tmp_path: Path) -> None:
    curves, band = torch_band
    other = parity_losses(tmp_path / "other", "layers=fused", "classifier.scale=10.001")
    assert min(distance(other, curve) for curve in curves) > band


@pytest.mark.usefixtures("packages")
def test_the_command_and_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for layers in ("torch", "fused"):
        arguments = [*TINY_CLASSIFIER, f"layers={layers}", f"run.directory={tmp_path / layers}"]
        monkeypatch.setattr(sys, "argv", ["package_classifier", *arguments])
        package_classifier.main()
    output = capsys.readouterr().out
    assert "n_gram: 2" in (tmp_path / "fused" / "config.yaml").read_text()
    assert (tmp_path / "fused" / "sample.txt").read_text() in output
    picture = tmp_path / "comparison.png"
    comparison.main([str(tmp_path / "torch"), str(tmp_path / "fused"), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "balanced accuracy on held-out test modules" in capsys.readouterr().out


def test_the_picture_of_split_factors(tmp_path: Path) -> None:
    times = {"torch": 30.0, "auto": 12.0, "S = 1": 200.0, "S = 2": 90.0, "S = 4": 12.5}
    plots.split_factors(times, "256 × 64 × 65,536", tmp_path / "split_factor.png")
    assert (tmp_path / "split_factor.png").read_bytes().startswith(b"\x89PNG")
