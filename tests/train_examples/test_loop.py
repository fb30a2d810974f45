"""The loop of the examples: a run can be interrupted, and a checkpoint or directory that does not fit is refused."""

from __future__ import annotations

import itertools
import json
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training_runs import (
    assert_same_checkpoint,
    settings,
    traced,
    train,
    train_classifier,
    without_measurements,
)
from train_examples import loop
from train_examples.language_model import build_model
from train_examples.parallel import Processes
from train_examples.rules import SettingsError


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_resume_forgets_rows_after_the_checkpoint(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    train(tmp_path / "killed", "run.stop_after=8")
    # A process that is killed between two checkpoints leaves rows that the resumed run computes again.
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 10}) + "\n")
    assert without_measurements(train(tmp_path / "killed", "run.resume=auto")) == without_measurements(straight)


@pytest.mark.parametrize("kinds", [("layers=fused", "loss=fused"), ("layers=torch",), ("layers=replaced",)])
def test_a_compiled_run_traces_its_training_steps_alone(kinds: tuple[str, ...], tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", *kinds)
    rows, graphs = traced(train, tmp_path / "compiled", *kinds)
    # Evaluations between the steps have other modes, and the sample has other sizes: neither adds a graph, or a guard
    # that has the next step traced again.
    assert len(graphs) == 1
    assert without_measurements(rows) == without_measurements(plain)
    found = [json.loads((tmp_path / name / "summary.json").read_text())["compiled"] for name in ("plain", "compiled")]
    assert found == [False, True]


@pytest.mark.parametrize("compiled_first", [True, False])
def test_checkpoints_of_compiled_and_other_runs_are_alike(compiled_first: bool, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    if compiled_first:
        traced(train, tmp_path / "resumed", "run.stop_after=4")
        rows = train(tmp_path / "resumed", "run.resume=auto")
    else:
        train(tmp_path / "resumed", "run.stop_after=4")
        rows, _ = traced(train, tmp_path / "resumed", "run.resume=auto")
    assert without_measurements(rows) == without_measurements(straight)
    assert_same_checkpoint(tmp_path / "straight", tmp_path / "resumed")


def test_other_examples_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole standard library takes long to read.
    for name in ("email", "unittest", "wsgiref"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, tmp_path / "library" / name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    rows, graphs = traced(train_classifier, tmp_path / "run", "run.steps=4")
    assert len(rows) == 2
    assert graphs


def test_the_optimizers_kernel_is_that_of_the_run(tmp_path: Path) -> None:
    train(tmp_path, "run.stop_after=4")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for group in saved["optimizer"]["param_groups"]:
        group["fused"] = True
    torch.save(saved, tmp_path / "checkpoint.pt")
    assert len(train(tmp_path, "run.resume=auto")) == 6
    groups = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["fused"] for group in groups] == [None, None]


def test_the_memory_of_the_warm_up_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = itertools.count(1000, -1)
    monkeypatch.setattr(loop, "peak_memory", lambda device: next(peaks))
    rows = train(tmp_path)
    compared = [row["peak_memory_bytes"] for row in rows if row["tokens_per_second"] is not None]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["peak_memory_bytes"] == max(compared) < rows[0]["peak_memory_bytes"]


def test_a_run_without_anything_left_to_do_still_ends_well(tmp_path: Path) -> None:
    train(tmp_path / "run", "run.stop_after=2")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["validation_loss"] is None
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    assert train(tmp_path / "other", f"run.resume={checkpoint}", "run.stop_after=2") == []
    assert (tmp_path / "other" / "sample.txt").read_text() == (tmp_path / "run" / "sample.txt").read_text()


def test_a_finished_run_stays_as_it_is_when_it_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = train(tmp_path)
    before = contents(tmp_path)
    capsys.readouterr()
    # Neither how it is started nor the number of threads makes it another run.
    assert train(tmp_path, "run.resume=auto", "run.overwrite=true", "run.threads=1") == rows
    assert contents(tmp_path) == before
    assert f"the run in {tmp_path} is finished after 12 steps; it stays as it is" in capsys.readouterr().out
    # Another prompt is asked of the model that was trained, and the rest is said of it as before.
    assert train(tmp_path, "run.resume=auto", "sample.prompt=class") == rows
    assert (tmp_path / "sample.txt").read_text().startswith("class")
    # What a step keeps was measured when there were steps.
    assert (tmp_path / "summary.json").read_bytes() == before["summary.json"]
    # With more steps it goes on.
    assert len(train(tmp_path, "run.resume=auto", "run.steps=16")) == len(rows) + 2


def test_a_checkpoint_fits_the_other_kind_of_layers(tmp_path: Path) -> None:
    train(tmp_path / "fused", "layers=fused", "run.stop_after=8")
    checkpoint = tmp_path / "fused" / "checkpoint.pt"
    rows = train(tmp_path / "torch", "layers=torch", f"run.resume={checkpoint}")
    assert [row["step"] for row in rows] == [10, 12]


def test_resume_auto_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    assert train(tmp_path, "run.resume=auto")[0]["step"] == 2


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    train(tmp_path, "run.stop_after=4")
    before = contents(tmp_path)
    with pytest.raises(SettingsError, match=r"another model.*model.d_model is 32 there and 64 here"):
        train(tmp_path, "run.resume=auto", "model.d_model=64")
    with pytest.raises(SettingsError, match=r"model.activation is gelu there and relu here"):
        train(tmp_path, "run.resume=auto", "model.activation=relu")
    with pytest.raises(
        SettingsError, match=r"model.gated is False there and True here.*gate_proj.weight is None there"
    ):
        train(tmp_path, "run.resume=auto", "model.gated=true")
    assert contents(tmp_path) == before


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(SettingsError, match=r"run.resume is '.*missing.pt'.*no such file"):
        train(run, f"run.resume={tmp_path / 'missing.pt'}")
    for name, content in {"text.pt": "a text", "other.pt": {"weights": torch.zeros(2)}, "code.pt": nn.ReLU()}.items():
        path = tmp_path / name
        path.write_text(content) if isinstance(content, str) else torch.save(content, path)
        # The last one would run code while it is loaded: weights_only refuses it.
        with pytest.raises(SettingsError, match=f"run.resume: .*{name}"):
            train(run, f"run.resume={path}")
    assert not run.exists()


def test_a_finished_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    first = train(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(SettingsError, match=r"already holds a run.*run.resume=auto.*run.overwrite=true"):
        train(tmp_path)
    assert contents(tmp_path) == before
    assert without_measurements(train(tmp_path, "run.overwrite=true")) == without_measurements(first)


def test_a_run_that_starts_over_leaves_nothing_of_an_older_one(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(FloatingPointError):
        train(tmp_path, "run.overwrite=true", "optim.learning_rate=1e30", "optim.warmup_steps=1")
    assert not (tmp_path / "checkpoint.pt").exists()
    # Or the older one's results would pass for those of this configuration.
    assert not (tmp_path / "summary.json").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"nan at step 2; .*optim.learning_rate"):
        train(tmp_path, "optim.learning_rate=1e30", "optim.warmup_steps=1")


def test_only_matrices_are_decayed(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "layers=fused")
    model = build_model(chosen.model, chosen.layers)
    decayed, kept = loop.build_optimizer(model, chosen.optim, "32-true").param_groups
    assert decayed["weight_decay"] == chosen.optim.weight_decay > 0
    assert kept["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") and "norm" not in names[id(p)] for p in decayed["params"])
    assert all(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_the_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    optim = settings(tmp_path, "optim.warmup_steps=10", "optim.learning_rate=1.0").optim
    rates = [loop.learning_rate(step, 100, optim) for step in range(1, 101)]
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == optim.final_learning_rate_fraction
    assert loop.learning_rate(5, 100, settings(tmp_path, "optim.warmup_steps=0").optim) > 0


@pytest.mark.parametrize(("device", "pinned"), [("cuda", 2), ("cpu", 0)])
def test_a_gpu_copies_batches_from_pinned_memory(device: str, pinned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other copy waits for the step before."""
    found: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: found.append(tensor) or tensor)
    processes: Any = object.__new__(Processes)
    processes.kind = "none"
    processes.fabric = SimpleNamespace(device=torch.device(device), to_device=lambda batch: batch)
    batch = (torch.arange(3), torch.arange(4))
    shared = processes.share(batch)
    assert all(map(torch.equal, shared, batch))
    assert len(found) == pinned
