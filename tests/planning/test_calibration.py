"""What the planner concludes from figures of the user's own GPU, and how these lie on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import calibrations, devices, planning
from fusedlayers.functional import dispatch
from fusedlayers.planning import Device, LinearProblem, Problem, ReduceProblem, plan
from fusedlayers.planning.calibration import Calibration, Entry, features

CARD = Device("cuda", "Some Card", "sm_86", sms=82, triton=True)
H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
FFN = Problem(
    "ffn", batch=1, M=4096, K=1024, N=4096, O=1024, dtype="bfloat16", activation="silu", gated=True,
    needs_data_gradient=True, needs_weight_gradient=True,
)  # fmt: skip


def entry(problem: Any, choice: str = "triton", speed: float = 1.2, path: str = "epilogue") -> Entry:
    """The problem as it would be recorded; a captured one as replayed."""
    return Entry(features(problem), problem.captured, choice, "torch" if choice == "torch" else path, speed, 0.01)


def on(device: Device, *entries: Entry) -> Device:
    return replace(device, calibration=Calibration(entries))


def sized(M: int, **change: Any) -> Problem:
    return replace(FFN, M=M, **change)


def test_features_are_the_sizes_and_what_differs_from_a_plain_call() -> None:
    found = features(replace(FFN, captured=True, compiled=True))
    assert found == features(FFN)
    assert dict(found.sizes) == {"batch": 1, "M": 4096, "K": 1024, "N": 4096, "O": 1024}
    assert dict(found.flags) == {
        "dtype": "bfloat16", "activation": "silu", "gated": True, "needs_data_gradient": True,
        "needs_weight_gradient": True,
    }  # fmt: skip
    linear = features(LinearProblem(M=1, N=2, K=3, dtype="float16", split_k=2))
    assert linear == ("linear", (("dtype", "float16"), ("split_k", 2)), (("M", 1), ("N", 2), ("K", 3)))
    assert "op" in dict(features(ReduceProblem(1, 2, 3, 4, "float32", "max")).flags)


def test_what_was_measured_runs_as_was_fastest() -> None:
    device = on(CARD, entry(FFN), entry(replace(FFN, captured=True), "torch", 0.93))
    made = plan(FFN, device)
    assert made.path == "epilogue"
    assert made.reason.endswith("; 1.20 times as fast as torch here, as calibrated")
    assert "1.20 times as fast as torch here" in dict(made.facts(device))["path"]
    replayed = plan(replace(FFN, captured=True), device)
    assert replayed.path == "torch"
    assert "kernels had 0.93 of its speed" in replayed.why_torch(device)
    # The user's own wish is heeded as ever.
    assert plan(replace(FFN, captured=True), device, "triton").path == "epilogue"
    assert plan(FFN, device, "torch").path == "torch"


@pytest.mark.parametrize(
    ("problem", "path"),
    [
        (sized(1024), "epilogue"),
        (sized(1040), "epilogue"),
        (sized(16_384), "epilogue"),
        # Beyond what was measured, or not aligned as both of them are.
        (sized(1023), "torch"),
        (sized(16_385), "torch"),
        (sized(1033), "torch"),
        (sized(2048, N=4095), "torch"),
        (sized(2048, K=2048), "torch"),
        # Another family.
        (sized(2048, dtype="float16"), "torch"),
        (sized(2048, activation="gelu"), "torch"),
        (sized(2048, gated=False), "torch"),
        (sized(2048, needs_data_gradient=False), "torch"),
        (sized(2048, captured=True), "torch"),
        (sized(2048, compiled=True), "torch"),
        (sized(2048, saved_limit=2**40), "torch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lies_between_two_wins_is_one(problem: Problem, path: str) -> None:
    made = plan(problem, on(CARD, entry(sized(1024), speed=1.1), entry(sized(16_384), speed=1.3)))
    assert made.path == path
    if path == "epilogue" and problem.M != 16_384:
        assert "1.10 times as fast" in made.reason, "the more cautious of both"
    if path == "torch":
        assert (
            "nothing like it was measured on this sm_86 GPU; python -m fusedlayers.bench calibrate"
            in (dict(made.rejected)["epilogue"])
        )


def test_an_odd_number_between_odd_and_even_ones_is_no_extrapolation() -> None:
    device = on(CARD, entry(sized(1023)), entry(sized(16_384)))
    assert plan(sized(1999), device).path == "epilogue"
    assert plan(sized(1022), device).path == "torch"


def test_a_loss_between_two_wins_keeps_both_sides_apart() -> None:
    entries = [entry(sized(M)) for M in (1024, 2048, 8192, 16_384)]
    device = on(CARD, *entries, entry(sized(4096), "torch", 0.98))
    paths = {M: plan(sized(M), device).path for M in (1536, 3072, 4096, 6144, 12_288)}
    assert paths == {1536: "epilogue", 3072: "torch", 4096: "torch", 6144: "torch", 12_288: "epilogue"}


def test_every_size_lies_between() -> None:
    device = on(CARD, entry(sized(1024, K=512, N=2048, O=512)), entry(sized(8192, K=2048, N=8192, O=2048)))
    inside = sized(4096)
    assert plan(inside, device).path == "epilogue"
    assert plan(replace(inside, N=16_384), device).path == "torch"
    # Two that won do not speak for a third which is smaller than one in one size and larger in the other.
    crossed = on(CARD, entry(sized(1024, N=8192)), entry(sized(8192, N=2048)))
    assert plan(inside, crossed).path == "torch"


def test_other_kernels_than_those_that_won_are_not_taken() -> None:
    narrow = sized(8192, K=64, O=64, N=256)
    assert plan(narrow, CARD, "triton").path == "fused"
    device = on(CARD, entry(narrow, path="fused"), entry(sized(8192), path="epilogue"))
    assert plan(narrow, device).path == "fused"
    assert plan(sized(8192, K=256, O=256, N=1024), device).path == "torch"
    assert plan(narrow, on(CARD, entry(narrow, path="epilogue"))).path == "torch", "as the tables were once"


def test_compiled_calls_need_both() -> None:
    compiled = replace(FFN, compiled=True)
    both = on(CARD, entry(FFN), entry(replace(FFN, captured=True)))
    assert plan(compiled, both).path == "epilogue"
    assert plan(compiled, on(CARD, entry(FFN), entry(replace(FFN, captured=True), "torch"))).path == "torch"
    assert plan(replace(compiled, captured=True), both).path == "epilogue"


def test_the_users_own_figures_come_before_those_of_the_architecture() -> None:
    large = sized(16_384)
    assert plan(large, H200).path == "epilogue"
    assert plan(large, on(H200, entry(large, "torch", 0.9))).path == "torch"
    small = sized(256)
    assert plan(small, H200).path == "torch"
    assert plan(small, on(H200, entry(small))).path == "epilogue"
    # What it does not know is decided as before, and so is what was fastest by the architecture's figures.
    assert plan(large, on(H200, entry(small))) == plan(large, H200)
    assert plan(large, on(H200, entry(large, "auto"))) == plan(large, H200)
    assert "as fast or faster below 1,024" in dict(plan(sized(512), on(H200, entry(small))).rejected)["epilogue"]


def test_a_sum_without_a_product_stays_one() -> None:
    reduction = ReduceProblem(8, 1024, 1024, 64, "bfloat16", "sum")
    assert plan(reduction, on(CARD, entry(reduction, "torch", 0.5))).path == "algebraic"


def test_what_failed_the_self_test_later_is_not_taken() -> None:
    device = on(CARD, entry(FFN))
    [name, *_] = planning.configurations(plan(FFN, device))["epilogue hidden_tiles"]
    made = plan(FFN, replace(device, avoided=frozenset({name})))
    assert made.path == "torch"


def test_never_is_only_said_where_nothing_won() -> None:
    half = replace(FFN, dtype="float32")
    assert "not measured on sm_86" in str(planning.why_never_kernels(FFN, CARD, "auto"))
    device = on(CARD, entry(FFN))
    assert planning.why_never_kernels(FFN, device, "auto") is None
    assert "nothing like it was measured" in str(planning.why_never_kernels(half, device, "auto"))
    assert planning.why_never_kernels(half, on(CARD, entry(half)), "auto") is None
    assert "float32 products" in str(planning.why_never_kernels(half, H200, "auto"))


def test_a_new_number_of_tokens_is_planned_at_once() -> None:
    entries = [entry(sized(16 * M, K=K, O=K)) for M in range(1, 60) for K in (256, 512, 1024)]
    device = on(CARD, *entries)
    assert plan(sized(16 * 40 + 8, K=512, O=512), device).path == "torch"
    assert plan(sized(16 * 40, K=768, O=768), device).path == "epilogue"


# On disk.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache folder, empty, and nothing that this process remembers of another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    devices._describe.cache_clear()
    yield tmp_path / "cache" / "fusedlayers" / "calibration.json"
    devices._describe.cache_clear()


def test_what_is_written_is_read(cache: Path) -> None:
    assert calibrations.on_record(CARD) is None
    assert not cache.exists()
    first, second = entry(FFN, speed=1.23456), entry(replace(FFN, captured=True), "torch", 0.9)
    assert calibrations.add(CARD, [first], "555.1") == cache
    assert calibrations.add(CARD, [second], "555.2") == cache
    found = calibrations.on_record(CARD)
    assert found is not None
    assert len(found) == 2
    assert found.answer(FFN) == first._replace(speed=1.2346)
    assert found.answer(replace(FFN, captured=True)) == second
    # Nothing but its lock is left beside it, and it says where its figures hold.
    assert {path.name for path in cache.parent.iterdir()} == {"calibration.json", "calibration.lock"}
    [record] = json.loads(cache.read_text())["records"]
    assert (record["gpu"], record["processors"], record["driver"]) == ("Some Card", 82, "555.2")
    assert record["torch"] == torch.__version__
    assert "Triton" in record["compiler"]
    assert all(len(each["hash"]) == 16 for each in record["entries"])
    # What is measured again replaces what was there.
    calibrations.add(CARD, [first._replace(choice="torch", path="torch", speed=0.8)], None)
    again = calibrations.on_record(CARD)
    assert again is not None
    assert (len(again), again.answer(FFN).choice) == (2, "torch")  # type: ignore[union-attr]


@pytest.mark.parametrize("field", ["gpu", "processors", "torch", "compiler", "sources"])
def test_figures_hold_for_one_gpu_and_the_versions_they_were_measured_with(
    field: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrations.add(CARD, [entry(FFN)], None)
    content = json.loads(cache.read_text())
    content["records"][0][field] = 7 if field == "processors" else "another one"
    cache.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "fusedlayers"):
        assert calibrations.on_record(CARD) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if field == "gpu" else 1)
    assert all(f"with these versions (others: {field}): python -m fusedlayers.bench calibrate" in line for line in said)


def test_another_assembler_changes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` sets one in the middle of a process, which ``calibrate`` does, too."""
    monkeypatch.setattr(calibrations, "toolchain", lambda architecture: "Triton 9, ptxas 12.8")
    calibrations.add(CARD, [entry(FFN)], None)
    monkeypatch.setattr(calibrations, "toolchain", lambda architecture: "Triton 9, ptxas 13.0")
    calibrations.add(CARD, [entry(sized(64))], None)
    found = calibrations.on_record(CARD)
    assert found is not None
    assert len(found) == 2
    [record] = json.loads(cache.read_text())["records"]
    assert record["toolchain"] == "Triton 9, ptxas 13.0"


def test_an_entry_that_was_edited_is_not_trusted(cache: Path) -> None:
    calibrations.add(CARD, [entry(FFN), entry(sized(64), "torch", 0.7)], None)
    content = json.loads(cache.read_text())
    [slow] = [each for each in content["records"][0]["entries"] if each["choice"] == "torch"]
    slow["choice"] = "triton"
    cache.write_text(json.dumps(content))
    found = calibrations.on_record(CARD)
    assert found is not None
    assert len(found) == 1
    assert found.answer(sized(64)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a calibration of schema 1"),
        ('{"schema": 2, "records": []}', "expected a calibration of schema 1"),
        ('{"schema": 1, "records": [{"gpu": "x"}]}', "is no complete calibration"),
        ('{"schema": 1, "records": 3}', "is no complete calibration"),
    ],
)
def test_a_file_that_is_none_is_named_and_ignored(
    text: str, words: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.raises(ValueError, match=words):
        calibrations.read(cache)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        assert calibrations.on_record(CARD) is None
    assert str(cache) in caplog.text
    calibrations.add(CARD, [entry(FFN)], None)
    assert calibrations.on_record(CARD) is not None


def test_teams_merge_what_each_has_measured(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing was measured here yet"):
        calibrations.export(tmp_path / "none.json")
    team = tmp_path / "shared" / "team.json"
    calibrations.add(CARD, [entry(FFN, speed=1.1), entry(sized(64), speed=1.5)], None)
    calibrations.add(replace(CARD, name="Another Card"), [entry(FFN)], None)
    assert calibrations.export(team) == 3
    # Another machine, with a file of its own.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    calibrations.add(CARD, [entry(FFN, speed=1.4), entry(sized(64), "torch", 0.9)], None)
    content = json.loads(team.read_text())
    content["records"][1]["entries"][0]["speed"] = 9.0
    team.write_text(json.dumps(content))
    # The slower one counts: of what another machine found faster nothing is taken over.
    assert calibrations.merge([team]) == (1, 1)
    found = calibrations.on_record(CARD)
    assert found is not None
    assert found.answer(FFN).speed == 1.1  # type: ignore[union-attr]
    assert found.answer(sized(64)).choice == "torch"  # type: ignore[union-attr]
    assert calibrations.merge([team]) == (0, 1)


def test_a_device_is_described_with_what_was_measured_on_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    cpu = torch.device("cpu")
    facts = devices.describe(cpu)
    assert facts.calibration is None
    calibrations.add(facts, [entry(FFN)], None)
    devices._describe.cache_clear()
    found = devices.describe(cpu)
    assert found.calibration is not None
    assert devices.describe(cpu) is found, "read once"
    with devices.uncalibrated():
        assert devices.describe(cpu).calibration is None
    assert devices.describe(cpu).calibration is not None


def test_one_line_says_how_a_gpu_without_figures_gets_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "describe", lambda device: CARD)
    dispatch._log_once.cache_clear()
    dispatch._cached_plan.cache_clear()
    with caplog.at_level(logging.INFO, "fusedlayers"):
        fl.functional.linear(torch.ones(2, 8), torch.ones(4, 8))
        fl.functional.ffn(torch.ones(2, 8), torch.ones(4, 8), torch.ones(8, 4))
        fl.functional.gemm_reduce(torch.ones(1, 2, 8), torch.ones(1, 8, 4), op="max")
    assert [record.getMessage() for record in caplog.records] == [
        "auto mode takes the torch path: the kernels were not measured on sm_86; python -m fusedlayers.bench "
        "calibrate does that, FUSEDLAYERS_BACKEND=triton runs them"
    ]
    dispatch._cached_plan.cache_clear()
