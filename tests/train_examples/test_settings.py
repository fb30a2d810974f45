"""Settings and surroundings that cannot work end a training example in one line, before it reads or builds anything."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.training_runs import ROOT, TINY, classifier_settings, search_settings, settings, train
from train_examples import comparison, language_model, loop
from train_examples.rules import SettingsError
from train_examples.settings import CodeSearchSettings, LanguageModelSettings, PackageClassifierSettings
from train_examples.transformer import feed_forward

# Of these the rule needs another setting, the interval of the rows.
INTERVALS = {"evaluate_every", "checkpoint_every", "stop_after"}


def run_command(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """The command of the language model, as if it were typed."""
    monkeypatch.setattr(sys, "argv", ["language_model", *TINY, *overrides])
    language_model.main()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.validation_fraction=nan", "data.validation_fraction is nan; expected a number between 0 and 1"),
        ("layers.recompute=-5", "layers.recompute is -5; expected auto, true or false, or a number of bytes above 1"),
        ("layers.recompute=1", "layers.recompute is 1; expected auto, true or false, or a number of bytes above 1"),
        ("model.context=-8", "model.context is -8; expected 1 or more"),
        ("loss.kind=eager", "loss.kind is 'eager'; expected fused or torch"),
        ("loss.recompute=true", "loss.recompute is true; expected false with loss=torch"),
        ("model.dropout=nan", r"model.dropout is nan; expected a probability in \[0, 1\)"),
        ("optim.beta1=1", r"optim.beta1 is 1.0; expected a share in \[0, 1\)"),
        ("optim.beta2=-1", r"optim.beta2 is -1.0; expected a share in \[0, 1\)"),
        ("optim.clip_norm=-1", "optim.clip_norm is -1.0; expected a number above 0"),
        ("optim.clip_norm=0", "optim.clip_norm is 0.0; expected a number above 0"),
        ("optim.final_learning_rate_fraction=nan", "optim.final_learning_rate_fraction is nan; expected a finite"),
        ("optim.learning_rate=-1", "optim.learning_rate is -1.0; expected a finite number, 0 or more"),
        ("optim.learning_rate=inf", "optim.learning_rate is inf; expected a finite number, 0 or more"),
        ("optim.learning_rate=nan", "optim.learning_rate is nan; expected a finite number, 0 or more"),
        ("optim.warmup_steps=-1", "optim.warmup_steps is -1; expected 0 or more"),
        ("optim.weight_decay=-1", "optim.weight_decay is -1.0; expected a finite number, 0 or more"),
        ("parallel.kind=pp", "parallel.kind is 'pp'; expected none, ddp, fsdp or tp"),
        ("run.accelerator=tpu9", "run.accelerator is 'tpu9'; expected auto, cpu, or a cuda, gpu or mps that"),
        ("run.batch_size=-1", "run.batch_size is -1; expected 1 or more"),
        ("run.checkpoint_every=0", "run.checkpoint_every is 0; expected a positive multiple of run.log_every=2"),
        ("run.threads=0", "run.threads is 0; expected 1 or more, or null"),
        ("run.directory=''", "run.directory is ''; expected the name of a folder"),
        ("run.evaluation_batches=0", "run.evaluation_batches is 0; expected 1 or more"),
        ("run.log_every=0", "run.log_every is 0; expected 1 or more"),
        ("run.precision=16", "run.precision is '16'; expected auto, 32-true, bf16-mixed, 16-mixed"),
        ("run.precision=fp3", "run.precision is 'fp3'; expected auto, 32-true, bf16-mixed, 16-mixed"),
        (f"run.seed={2**64}", f"run.seed is {2**64}; expected an integer that torch takes as a seed"),
        (f"run.seed={-(2**63) - 1}", "run.seed is -9223372036854775809; expected an integer that torch takes"),
        ("run.steps='${nothing}'", "run.steps: Interpolation key 'nothing' not found"),
        ("run.steps=???", "run.steps: .*missing mandatory value"),
        ("sample.length=-4", "sample.length is -4; expected 0 or more"),
        ("sample.temperature=nan", "sample.temperature is nan; expected a number above 0"),
        ("vocabulary.kind=words", "vocabulary.kind is 'words'; expected bytes or bpe"),
        ("vocabulary.size=100", "vocabulary.size is 100; expected 256 or more: one token for each byte"),
        ("vocabulary.size=1000", "vocabulary.size is 1000; expected 256 with vocabulary=bytes"),
        ("vocabulary.cache=''", "vocabulary.cache is ''; expected the name of a folder"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        settings(tmp_path / "run", override)
    assert "\n" not in str(refused.value)


def test_wrong_values_of_the_other_examples_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"search.length_penalty is nan; expected a finite number"):
        search_settings(tmp_path, "search.length_penalty=nan")
    with pytest.raises(SettingsError, match=r"data.test_fraction is 0.5 and .* expected their sum to be below 1"):
        search_settings(tmp_path, "data.test_fraction=0.5", "data.validation_fraction=0.5")
    with pytest.raises(SettingsError, match=r"data.lines is 0; expected 1 or more"):
        classifier_settings(tmp_path, "data.lines=0")
    with pytest.raises(SettingsError, match=r"layers.kind is 'eager'; expected fused or torch"):
        classifier_settings(tmp_path, "layers.kind=eager")


def test_an_accelerator_that_the_machine_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(backend, "is_available", lambda: False)
    for name in ("cuda", "gpu", "mps"):
        with pytest.raises(SettingsError, match=f"run.accelerator is '{name}'; expected auto, cpu, or a cuda"):
            settings(tmp_path, f"run.accelerator={name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settings(tmp_path, "run.accelerator=gpu").run.accelerator == "gpu"


@pytest.mark.parametrize("schema", [LanguageModelSettings, CodeSearchSettings, PackageClassifierSettings])
def test_every_number_has_a_rule(schema: type) -> None:
    for section in dataclasses.fields(schema):
        for entry in dataclasses.fields(section.default_factory):
            if str(entry.type).startswith(("int", "float")) and entry.name not in INTERVALS | {"split_k"}:
                assert "rule" in entry.metadata, f"{section.name}.{entry.name}"


@pytest.mark.parametrize(("word", "value"), [("100000", 100000), ("true", True), ("false", False), ("auto", "auto")])
def test_recompute_is_what_the_layer_takes(word: str, value: object, tmp_path: Path) -> None:
    chosen = settings(tmp_path, "layers=fused", f"layers.recompute={word}")
    assert feed_forward(chosen.model, chosen.layers).recompute == value


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_the_outermost_seeds_of_torch_are_taken(seed: int, tmp_path: Path) -> None:
    assert len(train(tmp_path, f"run.seed={seed}", "run.steps=2")) == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FUSEDLAYERS_BACKEND", "cuda", "one of auto, triton, torch"),
        ("FUSEDLAYERS_STRICT", "2", "0 or 1"),
        ("FUSEDLAYERS_WORKSPACE_MIB", "much", "a positive number of MiB"),
    ],
)
def test_a_wrong_switch_is_named_before_the_work(
    name: str, value: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^error: {name} is '{value}'; expected {expected}$"):
        run_command(monkeypatch, f"run.directory={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_directory_that_cannot_be_written_is_named_before_the_work(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    place = f"'{file}{below}'; expected a folder that files can be written into .{file} is no folder.$"
    with pytest.raises(SystemExit, match=f"^error: run.directory is {place}"):
        run_command(monkeypatch, f"run.directory={file}{below}")
    assert not capsys.readouterr().out


def test_what_is_no_checkpoint_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.pt"
    junk.write_text("junk")
    with pytest.raises(SystemExit, match=f"^error: run.resume: {junk} cannot be read as a checkpoint; .* wrote$"):
        run_command(monkeypatch, f"run.directory={tmp_path / 'run'}", f"run.resume={junk}")
    assert not capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=huge", "model is 'huge'; expected one of experts, narrow, small, tiny"),
        ("model=3", "model is 3; expected one of experts, narrow, small, tiny"),
        ("model=null", "model is null; expected one of experts, narrow, small, tiny"),
        ("vocabulary=words", "vocabulary is 'words'; expected one of bpe, bytes"),
        ("layers=true", "layers is true; expected one of fused, replaced, torch"),
        ("run.steps=abc", "Error merging override run.steps=abc; Value 'abc' .* could not be converted to Integer"),
        ("run.stpes=3", "Could not override 'run.stpes'; Key 'stpes' not in 'RunSettings'"),
        ("run.steps=[", "run.steps=.: no viable alternative"),
    ],
)
def test_what_hydra_refuses_takes_one_line(
    override: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stopped:
        run_command(monkeypatch, override)
    assert stopped.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {message}", line)


def test_a_loss_that_is_not_finite_takes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^error: the loss is nan at step 2; try a lower optim.learning_rate$"):
        run_command(monkeypatch, f"run.directory={tmp_path}", "optim.learning_rate=1e30", "optim.warmup_steps=1")


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step is computed."""
    rate = loop.learning_rate

    def interrupted(now: int, *others: object) -> float:
        if now == step:
            raise KeyboardInterrupt
        return rate(now, *others)

    monkeypatch.setattr(loop, "learning_rate", interrupted)


AGAIN = "make train STEPS=9 RESUME=yes"


@pytest.mark.parametrize(
    ("step", "command", "said"),
    [
        (3, None, "interrupted before the first checkpoint; the same command starts over"),
        (
            3,
            AGAIN,
            f"interrupted before the first checkpoint; {AGAIN} keeps the runs that are finished, and starts over",
        ),
        (
            7,
            None,
            "interrupted; the same command with run.resume=auto goes on from the last checkpoint, {}/checkpoint.pt",
        ),
        (7, AGAIN, f"interrupted; {AGAIN} goes on from the last checkpoint, {{}}/checkpoint.pt"),
    ],
)
def test_an_interruption_says_how_to_go_on(
    step: int,
    command: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        patch.delenv("RESUME_COMMAND", raising=False)
        if command is not None:
            patch.setenv("RESUME_COMMAND", command)
        with pytest.raises(SystemExit) as stopped:
            run_command(patch, f"run.directory={tmp_path}")
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == said.format(tmp_path)
    run_command(monkeypatch, f"run.directory={tmp_path}", "run.resume=auto")
    printed = capsys.readouterr().out
    assert ("resumed from" in printed) == (step == 7)
    # Without a checkpoint nothing is worth keeping, and yet it is said.
    assert (f"overwriting the earlier run in {tmp_path}" in printed) == (step == 3)


def test_interrupted_in_the_second_run_the_first_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of `make train`, and then of `make train RESUME=yes`."""

    def both(*resume: str) -> None:
        for layers in ("torch", "fused"):
            folder = tmp_path / layers
            run_command(monkeypatch, f"layers={layers}", f"run.directory={folder}", "run.overwrite=true", *resume)

    train(tmp_path / "fused", "layers=fused")
    with monkeypatch.context() as patch:
        rate, second = loop.learning_rate, False

        def interrupted(now: int, steps: int, *others: object) -> float:
            nonlocal second
            if second and now == 2:
                raise KeyboardInterrupt
            second = second or now == steps
            return rate(now, steps, *others)

        patch.setattr(loop, "learning_rate", interrupted)
        with pytest.raises(SystemExit):
            both()
    first = {path: path.read_bytes() for path in (tmp_path / "torch").iterdir()}
    assert not (tmp_path / "fused" / "summary.json").exists()
    both("run.resume=auto")
    assert {path: path.read_bytes() for path in (tmp_path / "torch").iterdir()} == first
    assert (tmp_path / "fused" / "summary.json").exists()


def test_a_run_says_what_it_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "run.steps=2")
    assert "overwriting" not in capsys.readouterr().out
    train(tmp_path, "run.steps=2", "run.overwrite=true")
    assert f"overwriting the earlier run in {tmp_path}\n" in capsys.readouterr().out


def test_a_comparison_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    train(tmp_path / "run", "run.steps=2")
    summary = tmp_path / "run" / "summary.json"
    with pytest.raises(SystemExit, match=f"error: --output: '{summary}'; expected a folder"):
        comparison.main([str(tmp_path / "run")] * 2 + ["--output", str(summary / "picture.png")])


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(*words: str, dry_run: bool = True) -> subprocess.CompletedProcess[str]:
    """What make does with these words; by default only shown, as a Makefile without its checks would install."""
    command = ["make", *["--dry-run"] * dry_run, "--no-print-directory", *words]
    # The tests may be run by make themselves, which hands its own flags down.
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MODEL", "RESUME", "RUNS", "STEPS")
    alone = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60)


TARGETS = "help train test test-full test-kernel test-bits test-triton check docs site dist hooks clean"


@needs_make
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL=huge", "train"], "MODEL is 'huge'; expected one of tiny narrow small experts"),
        (["MODEL=", "train"], "MODEL is ''; expected one of tiny narrow small experts"),
        (["MODEL=tiny small", "train"], "MODEL is 'tiny small'; expected one of tiny narrow small experts"),
        *(
            ([f"STEPS={steps}", "train"], f"STEPS is '{steps}'; expected a whole number, 1 or more")
            for steps in ("0", "-3", "1.5", "1e3", "many", "20 30")
        ),
        *(
            ([f"RESUME={resume}", "train"], f"RESUME is '{resume}'; expected yes, or nothing to start over")
            for resume in ("no", "YES", "true", "yes yes")
        ),
        (["trian"], f"there is no target 'trian'; expected one of {TARGETS}"),
        (["help", "trian"], f"there is no target 'trian'; expected one of {TARGETS}"),
    ],
)
def test_make_names_what_it_knows(words: list[str], said: str) -> None:
    done = make(*words)
    assert done.returncode
    assert not done.stdout
    [line] = done.stderr.splitlines()
    assert said in line
    assert {path.stem for path in (ROOT / "configs" / "model").iterdir()} == {"tiny", "narrow", "small", "experts"}


@needs_make
def test_files_and_folders_are_no_targets() -> None:
    """Make takes a name that lies there for a target that is up to date, and ends well: `make tests` tested nothing."""
    names = {path.name for path in ROOT.iterdir()} - set(TARGETS.split())
    assert {"tests", "kernels", "configs", "Makefile"} <= names
    for name in names:
        done = make(name)
        assert done.returncode
        assert f"there is no target '{name}'; expected one of {TARGETS}" in done.stderr


@needs_make
@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], []),
        (["STEPS=200"], ["run.steps=200"]),
        (["RESUME=yes"], ["run.resume=auto"]),
        (["RESUME=yes", "STEPS=15"], ["run.resume=auto", "run.steps=15"]),
    ],
)
def test_make_hands_its_settings_to_all_that_it_starts(words: list[str], settings: list[str]) -> None:
    shown = make("train", *words).stdout.splitlines()
    started = [line.split() for line in shown if re.search(r"-m train_examples\.(opening|language_model) ", line)]
    assert len(started) == 3
    for line in started:
        given = [word for word in line if word.startswith(("run.steps", "run.resume"))]
        assert given == settings


@needs_make
def test_make_begins_with_a_word_and_hands_on_what_the_opening_found(tmp_path: Path) -> None:
    """With a stand-in for Python, which tells how it was called."""
    python, runs = tmp_path / "environment" / "bin" / "python", tmp_path / "runs"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'echo "$RESUME_COMMAND: $*"\n'
        f'case "$*" in *opening*) mkdir {runs}; echo run.threads=7 layers.recompute=true > {runs}/settings.txt;; esac\n'
    )
    python.chmod(0o755)
    # Newer than everything that an environment is made from: nothing is installed.
    (tmp_path / "environment" / ".installed").touch()
    options = [f"VENV={tmp_path / 'environment'}", f"RUNS={runs}", "MODEL=tiny", "STEPS=9"]
    first, *shown = make("train", *options, dry_run=False).stdout.splitlines()
    # What follows is silent for a while: torch is imported, and steps are timed.
    assert first.startswith("Loading torch and timing some steps.")
    called = [line for line in shown if line.startswith("make train ")]
    opening, torchs, fused, compared = called
    given = f"MODEL=tiny STEPS=9 RUNS={runs} VENV={tmp_path / 'environment'}"
    assert opening.startswith(f"make train {given} RESUME=yes: -m train_examples.opening ")
    for name, line in (("torch", torchs), ("fused", fused)):
        assert f" layers={name} " in line
        assert " run.steps=9 run.threads=7 layers.recompute=true " in line
        assert line.endswith(f" run.directory={runs}/{name}")
    assert f" -m train_examples.comparison {runs}/torch {runs}/fused " in compared
