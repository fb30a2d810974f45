"""The language-model example: it learns, fused and torch layers learn the same, and wrong settings are named."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers.closeness import assert_close
from tests.support.training_runs import ROOT, TEXT, TINY, distance, parity_losses, settings, torch_curves, train
from train_examples import language_model, loop
from train_examples.command import Messages
from train_examples.language_model import build_model, flops_per_token, next_token_loss
from train_examples.transformer import rotary_tables, rotate


@pytest.mark.parametrize("layers", ["fused", "torch", "replaced"])
def test_a_run_learns_and_writes_everything(layers: str, tmp_path: Path) -> None:
    rows = train(
        tmp_path,
        f"layers={layers}",
        "run.steps=60",
        "run.batch_size=16",
        "optim.learning_rate=1e-2",
        in_short=layers != "fused",
    )
    # A model that knew only how frequent each byte is could not do better than the entropy of those frequencies.
    frequencies = torch.tensor(list(Path(TEXT).read_bytes())).bincount().double()
    shares = frequencies[frequencies > 0] / frequencies.sum()
    assert rows[0]["train_loss"] > rows[-1]["train_loss"]
    assert rows[-1]["validation_loss"] < -(shares * shares.log()).sum().item()

    names = {"config.yaml", "metrics.jsonl", "loss.png", "checkpoint.pt", "sample.txt", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [row["step"] for row in rows] == list(range(2, 62, 2))
    assert [row["step"] for row in rows if row["validation_loss"] is not None] == list(range(4, 61, 4))
    # No speed for the rows of the warm-up steps, and one for every other.
    measured = [row["step"] for row in rows if row["tokens_per_second"] is not None]
    assert measured == [row["step"] for row in rows if row["step"] - 2 >= loop.WARM_UP_STEPS]
    assert all(row["peak_memory_bytes"] > 0 and math.isfinite(row["gradient_norm"]) for row in rows)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (tmp_path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert len(sample) > len("def ")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["layers"] == layers
    assert summary["model_flops_per_second"] == summary["model_flops_per_token"] * summary["tokens_per_second"] > 0
    assert summary["validation_loss"] == rows[-1]["validation_loss"]
    assert OmegaConf.load(tmp_path / "config.yaml").model.d_model == 32


@pytest.mark.parametrize("options", [(), ("model.gated=true", "model.activation=silu"), ("model.bias=false",)])
def test_all_kinds_of_layers_start_equal(options: tuple[str, ...], tmp_path: Path) -> None:
    states = []
    for layers in ("torch", "fused", "replaced"):
        chosen = settings(tmp_path, f"layers={layers}", *options)
        torch.manual_seed(3)
        states.append(build_model(chosen.model, chosen.layers).state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


@pytest.fixture(scope="module")
def torch_band(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], float]:
    return torch_curves(tmp_path_factory.mktemp("torch"))


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)], ids=["torch path", "kernels"]
)
def test_fused_layers_stay_within_the_band_of_torch_runs(
    backend: str, torch_band: tuple[list[list[float]], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves, band = torch_band
    assert band > 0, "the orders of summation make no difference, so the band would prove nothing"
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    fused = parity_losses(tmp_path / "fused", "layers=fused")
    if min(distance(fused, curve) for curve in curves) > band:
        # A run amplifies roundings, so a right one may leave a band of six. A fault leaves that of another seed, too.
        fused = parity_losses(tmp_path / "again", "layers=fused", "run.seed=2")
        curves, band = torch_curves(tmp_path / "torch", "run.seed=2")
    assert min(distance(fused, curve) for curve in curves) <= band


def test_the_band_is_too_narrow_for_another_form_of_the_activation(
    torch_band: tuple[list[list[float]], float], tmp_path: Path
) -> None:
    curves, band = torch_band
    other = parity_losses(tmp_path / "other", "layers=fused", "model.activation=gelu_tanh")
    assert min(distance(other, curve) for curve in curves) > band


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_arithmetic_of_a_token(gated: bool, tmp_path: Path) -> None:
    model = settings(tmp_path, f"model.gated={gated}", "model.dropout=0.1").model
    # An entry of a matrix costs a token two operations forward and four backward; attention does as much with the
    # M x d_model entries of the keys, and of the values.
    feed_forward = (3 if gated else 2) * model.d_model * model.d_ff
    matrices = model.layers * (4 * model.d_model**2 + feed_forward) + model.d_model * 256
    expected = 6 * matrices + 12 * model.layers * model.context * model.d_model
    state = torch.get_rng_state()
    assert flops_per_token(model) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_all_kinds_of_layers_have_the_same_arithmetic(tmp_path: Path) -> None:
    for layers in ("torch", "fused", "replaced"):
        chosen = settings(tmp_path, f"layers={layers}")
        windows = torch.randint(256, (1, chosen.model.context + 1))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            next_token_loss(build_model(chosen.model, chosen.layers), (windows,)).backward()
        assert counter.get_total_flops() == chosen.model.context * flops_per_token(chosen.model)


def test_the_command_without_a_terminal_prints_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train_examples.language_model", *TINY, f"run.directory={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # All settings are in a file, which one line names.
    written = tmp_path / "run" / "config.yaml"
    assert "d_model: 32" in written.read_text()
    assert "d_model" not in done.stdout
    [line] = [line for line in done.stdout.splitlines() if str(written) in line]
    assert re.match(r"12 steps of 128 tokens on CPU, (1 thread|\d+ threads), ", line)
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [f"step {step:>2}/12" for step in range(2, 13, 2)]
    assert "\x1b" not in done.stdout
    assert (tmp_path / "run" / "sample.txt").read_text() in done.stdout
    assert str(tmp_path / "run") in done.stdout.splitlines()[-1]


def test_the_command_says_what_is_wrong_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["language_model", *TINY, f"run.directory={tmp_path}", "data.path=/no/such/file"])
    with pytest.raises(SystemExit, match=r"error: data.path is '/no/such/file': there is no such file"):
        language_model.main()
    monkeypatch.setattr(sys, "argv", ["language_model", *TINY, "run.stpes=3"])
    with pytest.raises(SystemExit) as stopped:
        language_model.main()
    assert stopped.value.code == 1
    assert "Key 'stpes' not in 'RunSettings'" in capsys.readouterr().err


def test_a_terminal_gets_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    train(tmp_path)
    output = capsys.readouterr().out
    assert "12/12" in output
    assert "━" in output
    assert "validation loss" in output


def test_a_message_of_the_library_does_not_break_the_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error is not what it was when the run began: the bar prints what is written to it above itself."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    messages = Messages()
    with loop.reporting(12, 0):
        drawn_over = sys.stderr
        monkeypatch.setattr(sys, "stderr", recorded := io.StringIO())
        messages.handle(
            logging.makeLogRecord({"name": "fusedlayers", "msg": "ffn takes the %s path", "args": ("torch",)})
        )
        monkeypatch.setattr(sys, "stderr", drawn_over)
    assert recorded.getvalue() == "fusedlayers: ffn takes the torch path\n"


def test_the_model_looks_only_back(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "layers=torch")
    model = build_model(chosen.model, chosen.layers)
    tokens = torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = torch.randint(256, (2, 12))
    before, after = model.features(tokens), model.features(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
    # The logits are of what follows the last token.
    assert torch.equal(model(tokens), model.head.linear(before[:, -1]))


def test_rotary_positions_are_a_product_of_complex_numbers() -> None:
    def turn(x: Tensor) -> Tensor:
        angles = torch.arange(8, dtype=x.dtype)[:, None, None, None] * 10_000.0 ** (
            -torch.arange(0, 16, 2, dtype=x.dtype) / 16
        )
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = torch.randn(2, 8, 2, 3, 16)
    assert_close(rotate(x, *rotary_tables(8, 16)), turn(x), turn(x.double()), "rotated")
