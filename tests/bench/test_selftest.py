"""The self-test: what fails is named, recorded, avoided by the planner, and forgotten once it passes again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import devices, planning
from fusedlayers.bench import __main__ as command
from fusedlayers.bench import selftest
from fusedlayers.bench.cases.trial import Trial
from fusedlayers.bench.selftest import processes, running
from fusedlayers.bench.selftest.trials import few_trials
from fusedlayers.functional import dispatch
from fusedlayers.kernels import gemm_epilogue, gemm_gemm, weight_gradient
from fusedlayers.kernels.device import HAS_TRITON
from fusedlayers.planning import Device

CPU = torch.device("cpu")
H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
[BLOCK] = [trial for trial in few_trials() if str(trial) == "ffn 37x24x40 relu fp16 (all)"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache folder, empty, and nothing that this process remembers of another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices._describe.cache_clear()
    yield tmp_path / "fusedlayers" / "selftest.json"
    devices._describe.cache_clear()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The data gradient is off by one in one element."""
    launched = gemm_gemm.data_gradient

    def off_by_one(*arguments: Any, **options: Any) -> Any:
        dx, db_down = launched(*arguments, **options)
        dx.view(-1)[-1] += 1
        return dx, db_down

    monkeypatch.setattr(gemm_gemm, "data_gradient", off_by_one)
    return monkeypatch


def ffn_plan() -> planning.Plan:
    problem = planning.Problem("ffn", 1, 64, 24, 40, 24, "float16", "relu", needs_data_gradient=True)
    plan: planning.Plan = planning.plan(problem, devices.describe(CPU), "triton")
    return plan


@pytest.mark.interpreter
def test_a_fault_is_named_recorded_avoided_and_forgotten(
    cache: Path, planted: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "few_trials", lambda: [BLOCK])
    [name] = planning.configurations(BLOCK.plan(devices.describe(CPU)))["data_gradient_tiles"]
    assert ffn_plan().path == "fused"

    assert command.main(["selftest", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert f"FAILED {name}\n       ffn 37x24x40 relu fp16 (all): dx: NOT equal at 1 of 888 elements" in said
    assert "2 of 3 configurations give exact integers" in said
    [(place, recorded)] = json.loads(cache.read_text()).items()
    assert place.startswith("cpu, Triton ")
    assert recorded == [name]

    made = ffn_plan()
    assert made.path == "torch"
    assert made.avoided == (name,)
    # Whoever asks for the kernels is told why not, and everyone else gets torch's right numbers.
    layer, x = fl.FusedFFN(24, 40, activation="relu").half(), torch.randn(5, 24).half().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setenv("FUSEDLAYERS_BACKEND", "triton")
        with pytest.raises(RuntimeError, match="gave wrong numbers here in the self-test"):
            layer(x)
    assert layer(x).requires_grad

    planted.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    monkeypatch.setattr(selftest, "few_trials", lambda: [BLOCK])
    assert command.main(["--selftest", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 configurations give exact integers" in said
    assert "is forgotten" in said
    assert json.loads(cache.read_text()) == {}
    assert ffn_plan().path == "fused"


def test_a_test_of_some_configurations_leaves_what_is_on_record_of_others(cache: Path) -> None:
    devices.record_failures(H200, ["first", "second"])
    devices.record_failures(H200, ["third"], tested={"second", "third"})
    assert devices.failures_on_record(H200) == {"first", "third"}
    devices.record_failures(H200, [], tested={"first", "third"})
    assert json.loads(cache.read_text()) == {}


@pytest.mark.interpreter
@pytest.mark.parametrize("trial", few_trials(), ids=str)
def test_every_operation_passes_through_the_interpreter(trial: Trial) -> None:
    assert running.run(trial, CPU) == running.Outcome({})


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("trial", "kernel", "blamed"),
    [
        (str(BLOCK), (gemm_gemm, "weight_gradients"), {"gemm_gemm data_gradient", "gemm_gemm weight_gradient"}),
        ("ffn 37x144x40 relu fp32 (all)", (gemm_epilogue, "hidden_gradient"), {"hidden_gradient tiles"}),
        (
            "split_k 1x40x700 identity fp16 (all)",
            (weight_gradient, "weight_gradient"),
            {"linear data_gradient tiles", "weight_gradient tiles"},
        ),
    ],
)
def test_a_kernel_that_raises_is_blamed_with_its_words(
    trial: str, kernel: tuple[Any, str], blamed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(*kernel, fails)
    failures = running.run(next(one for one in few_trials() if str(one) == trial), CPU).failures
    assert {name.split(",")[0] for name in failures} == blamed
    assert all("RuntimeError: out of resources" in reason for reason in failures.values())


def test_without_anything_to_test_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "interpreted", lambda: False)
    monkeypatch.setattr(selftest, "HAS_TRITON", True)
    assert command.main(["selftest", "--device", "cpu"]) == 1
    assert "there is nothing to test: there is no GPU (TRITON_INTERPRET=1 tests" in capsys.readouterr().err
    monkeypatch.setattr(selftest, "HAS_TRITON", False)
    assert command.main(["selftest", "--device", "cpu"]) == 1
    assert "nothing to test: Triton is not installed" in capsys.readouterr().err
    monkeypatch.setattr(selftest, "HAS_TRITON", True)
    monkeypatch.setattr(selftest, "interpreted", lambda: True)
    assert selftest.why_nothing_to_test(CPU) is None
    assert "no kernel would be compiled" in str(selftest.why_nothing_to_test(torch.device("cuda")))


@pytest.mark.parametrize(
    ("trial", "result", "kernels"),
    [
        ("gated ffn 1024x256x512 relu bf16 (few)", "dw_up", ["stored"]),
        ("gated ffn 1024x256x512 relu bf16 (few)", "y", ["forward"]),
        ("gated ffn 1024x256x512 relu bf16 (recomputing)", "dx", ["data_gradient"]),
        ("gated ffn 1024x256x512 relu bf16 (recomputing)", "db_gate", ["weight_gradient"]),
        ("gemm_reduce 2x200x64x64 identity bf16 (few)", "db", ["gradient"]),
        ("weight_gradient 1000x64x136 identity bf16 (few)", "dw", ["pipeline"]),
        ("hidden_gradient 300x127x72 relu bf16 (generic)", "dz", ["tiles"]),
        ("hidden_gradient 1000x392x200 relu bf16 (few)", "db_up", ["pipeline"]),
        ("gated ffn 1024x512x512 relu bf16 (few)", "y", ["epilogue hidden_pipeline"]),
        ("gated ffn 1024x512x512 relu bf16 (few)", "dx", ["pipeline"]),
        ("gated ffn 1024x512x512 relu bf16 (generic)", None, ["epilogue hidden", "tiles"]),
        ("gated ffn 2048x512x1024 relu bf16 (recomputing)", "dx", ["epilogue data_gradient_pipeline"]),
        ("ffn 2077x544x1000 relu bf16 (recomputing, generic)", "dx", ["tiles"]),
        ("gated ffn 2048x512x1024 relu bf16 (recomputing)", "dw_up", ["pipeline"]),
        ("split_k 64x4096x1032 identity bf16 (all)", "y", ["forward tiles"]),
        ("split_k 64x4096x1032 identity bf16 (all)", "dx", ["data_gradient tiles"]),
        ("split_k 64x4096x1032 identity bf16 (all)", "dbias", ["pipeline"]),
        ("split_k 65x127x1001 identity bf16 (generic)", "dweight", ["tiles"]),
        ("maxsim 4x9x32x40x64 identity fp16 (few)", "dqueries", ["query_gradient"]),
        ("ffn 1024x64x512 relu bf16 (few)", None, ["data_gradient", "forward", "weight_gradient"]),
    ],
)
def test_the_kernel_that_computed_a_result_is_blamed(trial: str, result: str | None, kernels: list[str]) -> None:
    found = next(one for one in selftest.all_trials(H200) if str(one) == trial)
    blamed = running.blamed(found.plan(H200), result, "wrong")
    assert sorted(name.split(",")[0].split(" ", 1)[1] for name in blamed) == kernels
    assert not any("TileConfig" in name for name in blamed), "the sm90 kernel ran, not the one beside it"


# As if every kernel were launched on an H200: kernel by kernel what each trial launches, as far as trials differ.
LAUNCHES = """
from unittest import mock
from dataclasses import replace
import torch
from triton.runtime.jit import JITFunction
from fusedlayers.bench.cases import DTYPES
from fusedlayers.bench.contenders import FUSED, contender
from fusedlayers.bench.selftest.trials import all_trials, launched
from fusedlayers.bench.work import Work
from fusedlayers.functional import dispatch, switches
from fusedlayers.planning import Device

device = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
seen = set()
for trial in all_trials(device):
    case, options = trial.prepared()
    kinds = tuple(name.split(": ")[1].split("(")[0] for name in launched(trial.plan(device)).values())
    if (trial.case, trial.machine, kinds) in seen:
        continue
    seen.add((trial.case, trial.machine, kinds))
    dtype, names = DTYPES[trial.dtype], set()
    operands = case.operands(trial.shape, options).items()
    blank = {name: operand.blank(dtype, case.backward) for name, operand in operands}
    inputs = {
        name: torch.ones_like(each, device="cpu", requires_grad=each.requires_grad) for name, each in blank.items()
    }
    shapes = case.result_shapes(trial.shape, options)
    upstream = tuple(torch.ones(shape, dtype=case.result_dtype or dtype) for shape in shapes)
    facts = replace(device, **trial.facts)
    ours = contender(FUSED, case, options)
    with (
        mock.patch.object(JITFunction, "run", lambda kernel, *arguments, **more: names.add(kernel.__name__)),
        mock.patch.object(dispatch, "describe", return_value=facts),
        switches.switched({**ours.switches, **trial.switches}),
    ):
        frozen = frozenset(name for name, each in inputs.items() if not each.requires_grad)
        Work(inputs, upstream, case.backward, frozen=frozen).run(ours.call)
    sm90 = sum("Pipeline" in kind or kind.startswith("Sm90") or kind == "StoredConfig" for kind in kinds)
    stored = "StoredConfig" in kinds
    ran = sum(name.lstrip("_").startswith(("sm90", "stored")) for name in names)
    assert ran == sm90 + stored, (str(trial), kinds, names)
assert len(seen) > 15
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_trials_launch_the_sm90_kernels_that_they_are_meant_for(run_python: Callable[..., object]) -> None:
    run_python(LAUNCHES, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")


@pytest.mark.interpreter
def test_a_process_that_dies_or_hangs_is_that_of_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = processes._Worker(CPU)
    try:
        worker.begin(BLOCK)
        worker.process.kill()
        outcome = worker.outcome() if worker.connection.poll(60) else None
        assert outcome.broken
        assert len(outcome.failures) == 3
        assert all("exit code -9" in reason for reason in outcome.failures.values())
    finally:
        worker.end()
    found: dict[str, str] = {}
    monkeypatch.setattr(processes, "LIMIT", 0.0)
    processes.run_in_processes([BLOCK], CPU, 1, lambda trial, outcome: found.update(outcome.failures))
    assert len(found) == 3
    assert all("no result after 0 seconds" in reason for reason in found.values())


@pytest.mark.interpreter
def test_trials_run_in_processes() -> None:
    finished: dict[Trial, running.Outcome] = {}
    trials = [trial for trial in few_trials() if "gradient" in trial.case]
    processes.run_in_processes(trials, CPU, 1, finished.__setitem__)
    assert finished == dict.fromkeys(trials, running.Outcome({}))


@pytest.mark.parametrize("text", ["{", "[1]", '{"cpu": "everything"}'])
def test_a_record_that_cannot_be_read_is_ignored_and_said(
    cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        assert devices.failures_on_record(H200) == frozenset()
    assert f"{cache}: " in caplog.text
    assert "it is ignored" in caplog.text


def test_a_result_that_cannot_be_recorded_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(selftest, "why_nothing_to_test", lambda device: None)
    monkeypatch.setattr(selftest, "few_trials", list)
    monkeypatch.setattr(selftest, "find_failures", lambda trials, device, say: {"forward": "NOT equal"})
    assert selftest.main(CPU) == 1
    assert "not recorded, so that auto mode does not know of it: " in capsys.readouterr().out


def test_records_of_other_machines_stay(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Device("cuda", "NVIDIA A100", "sm_80", triton=True)
    assert devices.record_failures(H200, []) is None
    assert not cache.exists()
    devices.record_failures(other, ["b", "a"])
    devices.record_failures(H200, ["c"])
    assert devices.failures_on_record(other) == {"a", "b"}
    # Another assembler may do better, or worse: it starts without a record.
    with monkeypatch.context() as patch:
        patch.setattr(devices, "toolchain", lambda architecture: "Triton 9, ptxas 99")
        assert devices.failures_on_record(other) == frozenset()
    assert devices.record_failures(H200, []) == cache
    assert devices.failures_on_record(H200) == frozenset()
    assert devices.failures_on_record(other) == {"a", "b"}


def test_facts_are_assumed_for_a_while() -> None:
    before = dispatch.describe(CPU)
    with devices.assumed(sms=7), devices.assumed(triton=False):
        assert (dispatch.describe(CPU).sms, dispatch.describe(CPU).triton) == (7, False)
    assert dispatch.describe(CPU) is before
