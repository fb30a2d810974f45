"""Kernels under a release of Triton that is not known: tested once for each GPU, before auto mode takes any."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedlayers as fl
from fusedlayers import devices, explaining, folders, releases
from fusedlayers.bench import selftest
from fusedlayers.bench.selftest.trials import all_trials, launched, short_trials
from fusedlayers.functional import dispatch
from fusedlayers.planning import Device, Problem
from fusedlayers.planning.record import Record
from fusedlayers.replacing import saving
from tests.support.records import rows

CPU = torch.device("cpu")
FFN = Problem("ffn", 1, 16_384, 1024, 4096, 1024, "bfloat16", "gelu", needs_data_gradient=True)
# Kernels are known to be faster on it.
H200 = Device(
    "cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90",
    override=Record([*rows(FFN, {"epilogue": 0.5}), *rows(replace(FFN, needs_data_gradient=False), {"epilogue": 0.5})]),
)  # fmt: skip
# Torch's, whatever is known of kernels.
TINY = Problem("ffn", 1, 1, 1024, 4096, 1024, "float32", "gelu")
RAN = "with open('ran', 'a') as file: file.write('x')\n"
PASSES = RAN
FAILS = RAN + "print('FAILED ffn forward\\n       y: NOT equal\\nselftest: 44 of 45'); raise SystemExit(1)"
HANGS = (
    RAN + "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"
)
HANGS += "\ntime.sleep(60)"


class Machine:
    """A GPU that is not there, under Triton 3.10.0; the self-test is any piece of Python."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.selftest = PASSES
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.chdir(folder)
        monkeypatch.setattr(releases, "release_is_known", lambda: False)
        monkeypatch.setattr(releases, "compiler", lambda: "Triton 3.10.0")
        monkeypatch.setattr(releases, "toolchain", lambda architecture: "Triton 3.10.0, ptxas 14.0")
        monkeypatch.setattr(releases, "command", self.command)
        for module in (dispatch, explaining, saving):
            monkeypatch.setattr(module, "describe", self.describe)
        self.begin()

    def begin(self) -> None:
        """As a process that starts anew."""
        releases._unrecorded.clear()
        for remembered in (releases.warn_once, folders.say_once, dispatch._cached_plan, dispatch._log_once):
            remembered.cache_clear()

    def command(self, device: torch.device) -> Sequence[str]:
        return [sys.executable, "-S", "-c", self.selftest]

    def describe(self, device: torch.device) -> Device:
        return replace(H200, **releases.standing(H200))

    @property
    def tests(self) -> int:
        """How often the self-test has run."""
        ran = self.folder / "ran"
        return len(ran.read_text()) if ran.exists() else 0

    @property
    def record(self) -> Path:
        return self.folder / "cache" / "fusedlayers" / "releases.json"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path, monkeypatch)
    yield made
    made.begin()


def path_of(problem: Any) -> str:
    return str(dispatch.dispatch(problem, CPU).path)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The WARNINGs that say that torch runs; the one that a test begins is none of them."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "auto mode takes torch" in record.getMessage()
    ]


def test_one_test_before_the_first_kernel_and_then_a_record(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert path_of(TINY) == "torch"
    assert machine.tests == 0, "no kernel would run"
    for _ in range(2):
        assert path_of(FFN) == path_of(replace(FFN, M=32_768)) == "epilogue"
    assert machine.tests == 1
    [(place, outcome)] = json.loads(machine.record.read_text()).items()
    assert place.startswith("NVIDIA H200, Triton 3.10.0, ptxas 14.0, sources ")
    assert outcome == ""
    machine.begin()
    assert path_of(FFN) == "epilogue"
    assert machine.tests == 1, "the next process reads the record"
    assert not warnings_in(caplog)
    [told] = [record.getMessage() for record in caplog.records if "half a minute" in record.getMessage()]
    assert told.startswith("Triton 3.10.0 is none of the releases that the kernels are known to compile with")


def test_a_known_release_is_not_tested(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "release_is_known", lambda: True)
    assert path_of(FFN) == "epilogue"
    assert machine.describe(CPU) == H200
    assert machine.tests == 0


@pytest.mark.parametrize("change", ["kernels", "toolchain", "gpu"])
def test_what_a_test_tells_holds_for_a_gpu_a_toolchain_and_these_kernels(
    change: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.record(H200)
    assert "left_to_torch" not in releases.standing(H200)
    other = replace(H200, name="NVIDIA H100") if change == "gpu" else H200
    if change == "kernels":
        monkeypatch.setattr(releases, "_sources", lambda: "others")
    elif change == "toolchain":
        monkeypatch.setattr(releases, "toolchain", lambda architecture: "Triton 3.10.0, ptxas 14.1")
    assert releases.standing(other)["untested"]


def test_a_gpu_that_auto_mode_leaves_to_torch_anyway_is_not_tested(machine: Machine) -> None:
    assert releases.standing(replace(H200, architecture="sm_86", override=None)) == {}
    assert releases.standing(Device("cpu", "cpu")) == {}


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_who_names_a_backend_gets_it_untested(
    backend: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    assert path_of(FFN) == {"triton": "epilogue", "torch": "torch"}[backend]
    assert machine.tests == 0
    assert not warnings_in(caplog)


def test_a_failure_means_torch_and_one_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.selftest = FAILS
    for _ in range(2):
        assert path_of(FFN) == path_of(replace(FFN, M=32_768)) == "torch"
    words = "Triton 3.10.0, which failed the self-test on this machine (ffn forward y: NOT equal)"
    [said] = warnings_in(caplog)
    assert words in said
    assert "python -m fusedlayers.bench selftest tests every kernel" in said
    reason = dict(dispatch.dispatch(FFN, CPU).rejected)["epilogue"]
    assert reason.startswith(words)
    machine.begin()
    caplog.clear()
    machine.selftest = PASSES
    assert path_of(FFN) == "torch"
    assert machine.tests == 1, "what is recorded is not tested again"
    assert len(warnings_in(caplog)) == 1


def test_the_whole_self_test_judges_every_configuration_by_itself(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.selftest = FAILS
    assert path_of(FFN) == "torch"
    monkeypatch.setattr(selftest, "why_nothing_to_test", lambda device: None)
    monkeypatch.setattr(selftest, "describe", machine.describe)
    monkeypatch.setattr(selftest, "few_trials", list)
    monkeypatch.setattr(selftest, "find_failures", lambda trials, device, say: {"ffn forward": "y: NOT equal"})
    assert selftest.main(CPU, lambda line: None, short=True) == 1
    assert path_of(FFN) == "torch", "a short one does not"
    assert selftest.main(CPU, lambda line: None) == 1
    assert path_of(FFN) == "epilogue"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('selftest: there is nothing to test: there is no GPU')", "there is no GPU"),
        ("import os; os.abort()", "status -6"),
        (FAILS.replace("NOT equal", "CUDA error: out of memory"), "selftest: 44 of 45"),
    ],
    ids=["nothing to test", "a crash", "no memory"],
)
def test_a_test_that_could_not_be_run_is_not_recorded(
    code: str, words: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.selftest = code
    assert path_of(FFN) == path_of(replace(FFN, M=32_768)) == "torch"
    [said] = warnings_in(caplog)
    assert "which was not tested on this machine: the self-test could not be run (" in said
    assert words in said
    assert not machine.record.exists()
    machine.begin()
    machine.selftest = PASSES
    assert path_of(FFN) == "epilogue"


def test_a_test_that_hangs_ends_with_all_that_it_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(releases, "LIMIT", 3.0)
    machine.selftest = HANGS
    started = time.monotonic()
    assert path_of(FFN) == "torch"
    # Its output ends only with the last process that has it.
    assert time.monotonic() - started < 30
    [said] = warnings_in(caplog)
    assert "whose self-test on this machine did not end within 3 s" in said
    assert "did not end" in machine.record.read_text()


def test_no_interpreter_to_start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "command", lambda device: ["/nowhere/python"])
    assert path_of(FFN) == "torch"
    assert "No such file" in machine.describe(CPU).release_note


def test_without_a_place_for_the_record_nothing_is_tested(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert path_of(FFN) == "torch"
    assert machine.tests == 0
    [said] = warnings_in(caplog)
    assert "/dev/null" in said
    assert "; set XDG_CACHE_HOME to another folder" in said


def test_a_capture_and_a_trace_do_not_wait(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert path_of(replace(FFN, captured=True)) == "torch"
    with FakeTensorMode():
        assert path_of(FFN) == "torch"
    assert machine.tests == 0
    [said] = warnings_in(caplog)
    assert "a plain call before what is captured or compiled" in said
    assert path_of(FFN) == "epilogue"
    assert path_of(replace(FFN, captured=True)) == "epilogue"
    assert machine.tests == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replace_tests_before_a_model_is_compiled(dtype: torch.dtype, machine: Machine) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))).to(dtype)
    assert len(fl.replace(model).replaced) == 1
    assert machine.tests == (dtype is torch.bfloat16), "float64 is torch's, whatever the release"


# Another process of the same job: it holds the lock while it tests, and then writes what came of it.
HOLDER = """
import fcntl, json, sys, time
lock, record, place = sys.argv[1:]
with open(lock, "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(1)
    with open(record, "w") as out:
        json.dump({place: ""}, out)
"""


def test_another_process_that_tests_is_waited_for(machine: Machine) -> None:
    machine.record.parent.mkdir(parents=True)
    lock = machine.record.with_suffix(".testing")
    command = [sys.executable, "-S", "-c", HOLDER, str(lock), str(machine.record), releases._place(H200)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        assert path_of(FFN) == "epilogue"
    assert other.returncode == 0
    assert machine.tests == 0


def test_another_process_that_never_ends_is_not_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "LIMIT", 0.5)
    with folders.locked(machine.record.with_suffix(".testing")):
        assert path_of(FFN) == "torch"
    assert "another process has not finished testing it" in machine.describe(CPU).release_note
    assert machine.tests == 0


def test_explain_names_the_release(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((16_384, 1024), (4096, 1024))]
    call = (fl.functional.ffn, *inputs, inputs[1].T)
    passed = fl.explain(*call, details=True)
    assert "  compiler" in passed
    assert "Triton 3.10.0, which passed the self-test on this machine" in passed
    releases.record(H200, "which failed the self-test on this machine (ffn)")
    failed = fl.explain(*call, details=True)
    assert failed.startswith("Runs through torch: Triton 3.10.0, which failed the self-test on this machine (ffn)")
    monkeypatch.setattr(releases, "release_is_known", lambda: True)
    assert "Triton" not in fl.explain(*call, details=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"NVIDIA H200": 1}'])
def test_a_record_that_is_none_is_replaced(text: str, machine: Machine) -> None:
    machine.record.parent.mkdir(parents=True)
    machine.record.write_text(text)
    assert path_of(FFN) == "epilogue"
    assert machine.tests == 1
    assert list(json.loads(machine.record.read_text()).values()) == [""]


def test_what_was_found_is_part_of_what_compiled_graphs_are_kept_by(machine: Machine) -> None:
    before = devices.records()
    releases.record(H200)
    assert devices.records() != before


def test_short_trials_take_every_kind_of_kernel() -> None:
    kinds = [
        {name.split("(")[0] for trial in trials for name in launched(trial.plan(H200)).values()}
        for trials in (short_trials(H200), all_trials(H200))
    ]
    assert kinds[0] == kinds[1]
    assert len(short_trials(H200)) < len(all_trials(H200)) / 10


def test_the_self_test_is_found_by_the_process_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same interpreter from anywhere, whatever was added to its path."""
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(releases.command(CPU), capture_output=True, text=True, env={"TRITON_INTERPRET": "0"})
    assert done.returncode == 1
    assert "selftest: there is nothing to test: " in done.stderr


# A release whose Gluon has lost a name that every kernel needs as it is imported.
RENAMED = """
from triton.experimental.gluon import language
del language.constexpr
import torch
import fusedlayers as fl
from fusedlayers.kernels import hopper
assert not hopper.HAS_GLUON
fl.FusedFFN(8, 16)(torch.randn(2, 8))
"""


@pytest.mark.interpreter
def test_a_gluon_with_other_names_imports(run_python: Callable[..., Any]) -> None:
    run_python(RENAMED, TRITON_INTERPRET="0")
