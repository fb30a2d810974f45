"""The language model on two processes: the curve of one, bit-equal resume, and checkpoints that fit any number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.operands import ON_GPU
from tests.support.processes import Processes, free_port
from tests.support.training_runs import (
    PARITY,
    ROOT,
    TINY,
    band_width,
    distance,
    settings,
    torch_curves,
    traced,
    train,
    without_measurements,
)
from train_examples import loop
from train_examples.parallel import check_parallel
from train_examples.rules import SettingsError
from train_examples.settings import RunSettings

pytestmark = [
    pytest.mark.xdist_group("two processes of the language model"),
    pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_language_model_parallel_gpu.py runs the same on two GPUs"),
]
# In float32 everywhere, so that curves differ by the order of sums alone.
DEVICE = (f"run.accelerator={'cuda' if ON_GPU else 'cpu'}", "run.precision=32-true")
WORDS = ("ddp", "fsdp", "tp")


@pytest.fixture(scope="module")
def band(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], float]:
    directory = tmp_path_factory.mktemp("torch")
    curves, width = torch_curves(directory, *DEVICE)
    assert width > 0, "the orders of summation make no difference, so the band would prove nothing"
    # Those orders are of the feed-forward blocks; tensor parallelism adds up the parts of attention in another, too.
    curves.append([row["train_loss"] for row in run(processes, directory / "tp", "tp", *PARITY, "layers=torch")])
    return curves, band_width(curves)


def run(processes: Processes, directory: Path, word: str, *overrides: str) -> list[loop.Row]:
    """The rows of a run: of this process for ``none``, else of two."""
    overrides = (*DEVICE, f"parallel={word}", *overrides)
    if word == "none":
        return train(directory, *overrides)
    rows, others = processes.run(train, directory, *overrides)
    assert rows == others, "both read what the first one wrote"
    return rows


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    # One after the other: the second continues from the checkpoint of the first.
    [("ddp",), ("fsdp",), ("tp",), ("none", "tp"), ("ddp", "fsdp"), ("fsdp", "none"), ("tp", "ddp")],
    ids=" then ".join,
)
def test_the_curve_is_that_of_one_process(
    words: tuple[str, ...], processes: Processes, band: tuple[list[list[float]], float], tmp_path: Path
) -> None:
    stop = () if len(words) == 1 else ("run.stop_after=30",)
    kinds = ("layers=fused", "loss=fused")
    rows = run(processes, tmp_path / "run", words[0], *PARITY, *kinds, *stop)
    for word in words[1:]:
        assert len(rows) == 30
        rows = run(processes, tmp_path / "run", word, *PARITY, *kinds, "run.resume=auto")
    curves, width = band
    losses = [row["train_loss"] for row in rows]
    assert min(distance(losses, curve) for curve in curves) <= width
    # The checkpoint before goes, whatever its kind was.
    kept = [path.name for path in (tmp_path / "run").glob("checkpoint*")]
    assert kept == ["checkpoint.pt" if words[-1] in ("none", "ddp") else "checkpoint-00000060"]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        pytest.param("torch", ("none", "tp"), marks=pytest.mark.full),
        pytest.param("replaced", ("none", *WORDS), marks=pytest.mark.full),
        pytest.param("replaced", ("none", "fsdp"), marks=pytest.mark.full),
    ],
)
def test_other_layers(layers: str, words: tuple[str, ...], processes: Processes, tmp_path: Path) -> None:
    """torch's own styles split torch layers; the sample is that of one process, byte by byte."""
    for word in words:
        run(processes, tmp_path / word, word, f"layers={layers}", "model.gated=true")
    samples = {word: (tmp_path / word / "sample.txt").read_text() for word in words}
    assert len(set(samples.values())) == 1, samples


@pytest.mark.full
def test_compiled_steps_under_ddp(processes: Processes, tmp_path: Path) -> None:
    plain = run(processes, tmp_path / "plain", "ddp", "loss=fused")
    replies = processes.run(compiled, tmp_path / "compiled", *DEVICE, "parallel=ddp", "loss=fused")
    assert replies == [(without_measurements(plain), 1)] * 2


def compiled(directory: Path, *overrides: str) -> tuple[list[loop.Row], int]:
    rows, graphs = traced(train, directory, *overrides)
    return without_measurements(rows), len(graphs)


@pytest.mark.parametrize("word", ["fsdp", pytest.param("tp", marks=pytest.mark.full)])
def test_mixed_precision_learns(word: str, processes: Processes, tmp_path: Path) -> None:
    kinds = ("layers=fused", "loss=fused")
    rows = run(processes, tmp_path, word, *kinds, "run.precision=bf16-mixed", "optim.learning_rate=1e-2")
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["validation_loss"] < rows[0]["train_loss"]


@pytest.mark.parametrize("word", ["fsdp", *(pytest.param(word, marks=pytest.mark.full) for word in ("ddp", "tp"))])
def test_an_interrupted_run_continues_bit_by_bit(word: str, processes: Processes, tmp_path: Path) -> None:
    # Dropout makes the state of the generators matter, of which each process may have its own.
    options = ("layers=fused", "loss=fused", "model.dropout=0.2")
    straight = run(processes, tmp_path / "straight", word, *options)
    run(processes, tmp_path / "resumed", word, *options, "run.stop_after=8")
    resumed = run(processes, tmp_path / "resumed", word, *options, "run.resume=auto")
    assert without_measurements(resumed) == without_measurements(straight)


def test_a_checkpoint_of_another_model_is_refused(processes: Processes, tmp_path: Path) -> None:
    run(processes, tmp_path, "fsdp", "run.stop_after=4")
    with pytest.raises(SettingsError, match="already holds a run"):
        train(tmp_path)
    with pytest.raises(SettingsError, match=r"model.d_model is 32 there and 64 here.*embedding.weight is \(256, 32\)"):
        train(tmp_path, "run.resume=auto", "model.d_model=64")
    # What a killed process leaves has no metadata yet, and is no checkpoint.
    (tmp_path / "checkpoint-00000004" / ".metadata").unlink()
    with pytest.raises(SettingsError, match=r"there is no such file; .*a folder checkpoint-"):
        train(tmp_path, f"run.resume={tmp_path / 'checkpoint-00000004'}")
    assert train(tmp_path, "run.resume=auto", "run.stop_after=2")[0]["step"] == 2


@pytest.mark.parametrize(
    ("kind", "changes", "precision", "count", "message"),
    [
        ("pp", {}, "32-true", 2, "parallel.kind is 'pp'; expected none, ddp, fsdp or tp"),
        ("none", {}, "32-true", 2, "torchrun started 2 processes; expected ddp, fsdp or tp"),
        ("ddp", {"batch_size": 3}, "32-true", 2, "run.batch_size is 3; expected a multiple of the 2 processes"),
        ("fsdp", {"batch_size": 4}, "16-mixed", 2, "run.precision is '16-mixed'; expected 32-true or bf16-mixed"),
        ("fsdp", {"batch_size": 4, "compile": True}, "32-true", 2, "run.compile is true; expected false with parallel"),
        ("tp", {"compile": True}, "32-true", 2, "run.compile is true; expected false with parallel=tp"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    kind: str, changes: dict[str, int], precision: str, count: int, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_parallel(kind, RunSettings(**changes), precision, count)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_ff=65", "up_proj is 32 x 65; expected multiples of the 2 processes"),
        ("model.dropout=0.1", "model.dropout is above 0; with parallel=tp expected layers=fused"),
    ],
)
def test_what_tensor_parallelism_cannot_split_is_named(
    override: str, message: str, processes: Processes, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=f"SettingsError: .*{message}"):
        run(processes, tmp_path / "run", "tp", "layers=torch", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_torchrun(tmp_path: Path) -> None:
    """The command as a user types it: the first process speaks and writes."""
    # By number: not every machine can look up its own name.
    place = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *place, "-m"]
    command += ["train_examples.language_model", *TINY, *DEVICE, "parallel=fsdp", f"run.directory={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [f"step {step:>2}/12" for step in range(2, 13, 2)]
    names = {"config.yaml", "metrics.jsonl", "loss.png", "checkpoint-00000012", "sample.txt", "summary.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    shards = {path.name for path in (tmp_path / "run" / "checkpoint-00000012").glob("*.distcp")}
    assert len(shards) == 2
    # One process alone continues.
    assert train(tmp_path / "run", "run.resume=auto", "run.steps=14")[-1]["step"] == 14
    assert settings(tmp_path).parallel.kind == "none"
