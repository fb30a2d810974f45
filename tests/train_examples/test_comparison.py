"""What `make train` says before and after its two runs, on a CPU and on a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fusedlayers
from fusedlayers.devices import assumed
from tests.support.training_runs import TINY, settings, train
from train_examples import comparison, end_to_end, gpu_results, opening
from train_examples.memory import with_bytes_kept
from train_examples.settings import LayerSettings, ModelSettings
from train_examples.transformer import feed_forward

NARROW = ModelSettings("narrow", 256, 1024, 6, 4, 512)
SMALL = ModelSettings("small", 768, 3072, 12, 12, 1024)
H200 = gpu_results.MEASURED


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of torch layers and one of fused layers."""
    folder = tmp_path_factory.mktemp("runs")
    for layers in ("torch", "fused"):
        train(folder / layers, f"layers={layers}")
    return folder


def changed(runs: Path, copy: Path, **changes: object) -> Path:
    """A copy of both runs with other summaries."""
    shutil.copytree(runs, copy)
    for summary in copy.glob("*/summary.json"):
        summary.write_text(json.dumps({**json.loads(summary.read_text()), **changes}))
    return copy


def compare(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> str:
    picture = other / "new" / "comparison.png"
    comparison.main([str(one), str(other), "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert output.splitlines()[-1].endswith(str(picture))
    return output


def test_on_a_cpu_it_shows_how_little_fused_layers_keep(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "fused", "layers=fused", "layers.recompute=true")
    output = compare(runs / "torch", tmp_path / "fused", capsys)
    [line] = [line for line in output.splitlines() if line.startswith("kept for a backward pass, MiB")]
    kept = [
        json.loads((folder / "summary.json").read_text())["kept_bytes"]
        for folder in (runs / "torch", tmp_path / "fused")
    ]
    assert 0 < kept[1] < 0.8 * kept[0]
    assert line.split()[-1] == f"{kept[1] / kept[0]:.3f}"


def test_what_is_kept_are_whole_storages_without_parameters() -> None:
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 16)
    # The linear keeps its input, a part of x, and the activation its argument; weights are no part of a step.
    _, kept = with_bytes_kept(linear, lambda: torch.nn.functional.gelu(linear(x[:, :8])))
    assert kept == 4 * (4 * 16 + 4 * 8)


def test_on_a_cpu_losses_are_compared_and_a_gpu_s_results_are_shown(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = changed(runs, tmp_path / "runs")
    rows = [json.loads(line) for line in (copy / "fused" / "metrics.jsonl").read_text().splitlines()]
    rows[3]["train_loss"] += 0.25
    (copy / "fused" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = compare(copy / "torch", copy / "fused", capsys)
    # Two runs of the same operations: which one the machine disturbed less is no result.
    assert "peak memory" not in output
    assert "TFLOP/s" not in output
    assert comparison.ON_A_CPU in output
    assert "largest difference: 0.25 over 6 training losses, " in output
    assert gpu_results.text() in output


def test_a_gpu_s_results_come_with_their_origin() -> None:
    record = json.loads(end_to_end.RECORD.read_text())
    text = gpu_results.text()
    assert text.startswith(f"Measured on an {record['device']} (bf16-mixed, torch {record['torch']}")
    assert record["device"] == H200.name
    for name, group in record["groups"].items():
        assert f"{name} (commit {group['commit'][:10]}, {group['date']})" in text
        for run in group["runs"].values():
            assert f"  {run['summary']['tokens_per_second']:,.0f}  " in text


@pytest.mark.parametrize("recompute", ["auto", True])
@pytest.mark.parametrize(("model", "tokens"), [(NARROW, 131_072), (SMALL, 65_536), (SMALL, 16_384)])
def test_the_bytes_kept_are_those_that_explain_names(model: ModelSettings, tokens: int, recompute: bool | str) -> None:
    torchs, fused = gpu_results.bytes_kept(model, tokens, recompute)
    # Of torch: the input, the pre-activation and the activation of every hidden unit, two bytes each.
    assert torchs == 2 * (model.d_model + 2 * model.d_ff)
    facts = {name: getattr(H200, name) for name in ("kind", "name", "architecture", "sms", "triton", "backend")}
    layer = feed_forward(model, LayerSettings("fused", recompute)).bfloat16()
    with assumed(**facts):
        said = fusedlayers.explain(layer, torch.empty(tokens, model.d_model, dtype=torch.bfloat16), details=True)
    assert f"{fused * tokens:,} for the backward pass" in said


def test_runs_of_one_kind_are_compared_in_speed_and_memory(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = compare(runs / "torch", runs / "torch", capsys)
    summary = json.loads((runs / "torch" / "summary.json").read_text())
    assert f"{summary['tokens_per_second']:,.0f}" in output
    assert f"{summary['validation_loss']:.4f}" in output
    assert f"{summary['model_flops_per_second'] / 1e12:.3g}" in output
    assert "largest difference: 0 over 6 training losses, 0 over 3 validation losses" in output
    assert H200.name not in output
    # The share of a data sheet's peak is a GPU's.
    assert "data sheet" not in output


@pytest.mark.parametrize("device", [H200.name, "another GPU"])
def test_on_a_gpu_everything_is_compared(
    device: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = changed(runs, tmp_path / "runs", device=device)
    output = compare(copy / "torch", copy / "fused", capsys)
    assert "tokens per second" in output
    assert comparison.ON_A_CPU not in output
    assert ("Measured on an NVIDIA H200" in output) == (device != H200.name)


def test_a_run_that_is_not_finished_is_named(runs: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*absent holds no summary.json"):
        comparison.main([str(runs / "torch"), str(runs / "absent")])


def test_a_summary_of_something_else_is_named(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"error: {tmp_path}: summary.json is not that of a run of these examples"):
        comparison.main([str(runs / "torch"), str(tmp_path)])


@pytest.mark.parametrize("name", ["folder.png", "picture", "picture.doc"])
def test_a_picture_that_cannot_be_written_is_named(name: str, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit, match=f"error: --output: '{tmp_path / name}'; expected .* that ends in .png"):
        comparison.main([str(runs / "torch"), str(runs / "fused"), "--output", str(tmp_path / name)])
    assert not (tmp_path / f"{name}.png").exists()


def test_comparison_knows_the_peak_of_some_devices() -> None:
    summary = {
        "device": "NVIDIA H200", "precision": "bf16-mixed", "processes": 2, "train_loss": 1.0, "validation_loss": None,
        "tokens_per_second": 3e6, "model_flops_per_second": 989e12, "peak_memory_bytes": 1, "peak_memory_source": "",
    }  # fmt: skip
    assert "share of the data sheet's 1978 TFLOP/s, %          50.0" in comparison.table(["one"], [summary])
    assert "data sheet" not in comparison.table(["one"], [{**summary, "precision": "32-true"}])
    assert "TFLOP/s" not in comparison.table(["one"], [{**summary, "model_flops_per_second": None}])


def test_comparison_of_runs_too_short_to_be_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "layers=torch", "run.steps=2")
    assert "not measured" in compare(tmp_path, tmp_path, capsys)


def test_the_opening_on_a_cpu(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for folder, resume in ((tmp_path, "null"), (runs, "null"), (runs, "auto")):
        monkeypatch.setattr(sys, "argv", ["opening", *TINY, f"run.directory={folder}", f"run.resume={resume}"])
        opening.main()
        said.append(capsys.readouterr().out.replace("\n", " "))
    for paragraph in said:
        assert "trained twice for 12 steps of 128 tokens" in paragraph
        assert "PyTorch finds no CUDA or ROCm GPU" in paragraph
        assert "This takes about a minute." in paragraph
    assert "earlier" not in said[0]
    assert f"It overwrites the earlier runs in {runs}/torch and {runs}/fused." in said[1]
    for name in ("torch", "fused"):
        assert f"The run in {runs / name} is finished and stays." in said[2]


def test_the_opening_subtracts_what_is_done(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "seconds_per_step", lambda settings, device, threads: {1: 50.0})
    longer = [settings(runs, "run.steps=24", f"run.resume={resume}") for resume in ("null", "auto")]
    over, on = (opening.opening(chosen)[0] for chosen in longer)
    assert "This takes about 41 minutes. It overwrites the earlier runs" in over
    assert f"This takes about 21 minutes. The run in {runs / 'torch'} goes on after step 12." in on


@pytest.mark.parametrize(
    ("trial", "threads", "said"),
    [
        ({1: 0.05, 2: 0.07}, 1, "1 thread, because here a step takes 50 ms with 1 thread and 70 ms with 2 threads."),
        ({1: 0.9, 32: 0.08}, 32, "32 threads, because here a step takes 900 ms with 1 thread and 80 ms with 32"),
        ({1: 0.05}, 1, None),
    ],
)
def test_the_opening_takes_the_faster_number_of_threads(
    trial: dict[int, float], threads: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(trial))
    monkeypatch.setattr(
        opening, "seconds_per_step", lambda settings, device, tried: {each: trial[each] for each in tried}
    )
    monkeypatch.setattr(sys, "argv", ["opening", *TINY, f"run.directory={tmp_path / 'runs'}"])
    paragraph, _ = opening.opening(settings(tmp_path))
    assert ("Both runs use" in paragraph) == (said is not None)
    assert said is None or f"Both runs use {said}" in paragraph
    opening.main()
    assert (tmp_path / "runs" / opening.SUITABLE).read_text() == f"layers.recompute=true run.threads={threads}\n"


def test_every_number_of_threads_is_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    chosen, cpu = settings(tmp_path), torch.device("cpu")
    trial = opening.seconds_per_step(chosen, cpu, [1, 3])
    assert list(trial) == [1, 3]
    assert min(trial.values()) > 0
    assert used == [1, 3] * (1 + opening.TIMED_STEPS) + [now]
    # A model whose step takes minutes is not timed often.
    monkeypatch.setattr(opening, "TRIAL_SECONDS", 0.0)
    used.clear()
    assert opening.seconds_per_step(chosen, cpu, [1, 3]).keys() == {1, 3}
    assert used == [1, 3, now]


def test_a_run_takes_the_threads_that_it_is_told(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        train(tmp_path, "run.threads=2", "run.steps=2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads((tmp_path / "summary.json").read_text())["device"] == "CPU, 2 threads"


def test_an_interrupted_opening_takes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "seconds_per_step", interrupted)
    monkeypatch.setattr(sys, "argv", ["opening", *TINY, f"run.directory={tmp_path}"])
    with pytest.raises(SystemExit) as stopped:
        opening.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted before the runs began\n"


def test_what_cannot_work_is_named_before_the_opening(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["opening", *TINY, f"run.directory={runs}"])
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "bogus")
    with pytest.raises(SystemExit, match="error: FUSEDLAYERS_BACKEND is 'bogus'; expected one of auto, triton, torch"):
        opening.main()
    assert not capsys.readouterr().out


def test_the_opening_says_what_a_gpu_runs(tmp_path: Path) -> None:
    """By the plan, so that a machine on which torch computes both runs is told so before they start."""
    cpu = torch.device("cpu")
    narrow = ("model.d_model=256", "model.d_ff=1024", "model.context=512", "run.precision=bf16-mixed")
    chosen, short = (settings(tmp_path, *narrow, f"run.batch_size={size}") for size in (256, 2))
    facts = {"kind": "cuda", "architecture": "sm_90", "sms": 132, "triton": True, "backend": "sm90"}
    with assumed(**facts):
        assert opening.plan_in_words(chosen, cpu).startswith("Runs in the ")
        assert opening.plan_in_words(short, cpu).startswith("Runs through torch: expected")
    with assumed(**facts | {"architecture": "sm_80"}):
        assert opening.plan_in_words(chosen, cpu).startswith("Runs through torch: the kernels were not measured")


def test_the_opening_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path, "run.steps=1000", "run.accelerator=auto", "run.evaluate_every=1000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of type {device.type}")
    monkeypatch.setattr(opening, "plan_in_words", lambda settings, device: "Runs through torch: it is small.")
    monkeypatch.setattr(opening, "seconds_per_step", lambda settings, device, threads: {1: 0.5})
    paragraph, suitable = opening.opening(chosen)
    assert suitable == ["layers.recompute=auto"]
    assert "The GPU here is GPU of type cuda; a fused feed-forward block runs through torch: it is small." in paragraph
    assert "The end compares loss, speed and peak memory. This takes about 17 minutes." in paragraph


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "about a minute"), (200, "about 3 minutes"), (20_000, "about 6 hours")]
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert opening.duration(seconds) == words
