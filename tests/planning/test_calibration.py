"""What the planner concludes from times of the user's own GPU, and how these lie on disk."""

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
from fusedlayers.planning import Device, Problem, ReduceProblem, plan
from fusedlayers.planning.record import Record, Row
from tests.support.records import H200

CARD = Device("cuda", "Some Card", "sm_86", sms=82, triton=True)
# Operands that generic kernels read as well, as there are no others on such a card.
FFN = Problem(
    "ffn", batch=1, M=4096, K=64, N=256, O=64, dtype="bfloat16", activation="silu", gated=True,
    needs_data_gradient=True, needs_weight_gradient=True,
)  # fmt: skip


def row(problem: Any, launched: float = 0.8, replayed: float | None = None, path: str = "generic") -> Row:
    """A problem as it would be recorded: a path's time beside torch's, launched and in a graph."""
    times = [{"torch": 1e-4, path: 1e-4 * ratio} for ratio in (launched, launched if replayed is None else replayed)]
    return Row(problem.recorded_kin, problem.variant, problem.sizes, *times, sure=True)


def on(device: Device, *rows: Row) -> Device:
    return replace(device, calibration=Record(rows))


def sized(M: int, **change: Any) -> Problem:
    return replace(FFN, M=M, **change)


def test_what_was_measured_runs_as_was_fastest() -> None:
    device = on(CARD, row(FFN, 0.8, 1.1))
    made = plan(FFN, device)
    assert made.path == "fused"
    expected = dict(made.facts(device))["expected"]
    assert "fused" in expected
    assert "(measured: 80 µs), torch" in expected
    assert expected.endswith("measured at 4096 × 64 × 256")
    replayed = plan(replace(FFN, captured=True), device)
    assert replayed.path == "torch"
    assert "fused" in replayed.why_torch(device)
    # The user's own wish is heeded as ever.
    assert plan(replace(FFN, captured=True), device, "triton").path == "fused"
    assert plan(FFN, device, "torch").path == "torch"


def test_sizes_between_two_wins_are_wins_and_others_need_more() -> None:
    device = on(CARD, row(sized(1024), 0.8), row(sized(16_384), 0.8))
    assert {plan(sized(M), device).path for M in (1024, 1033, 4096, 16_384)} == {"fused"}
    # With far fewer tokens than were measured, a path must be expected to be clearly faster.
    assert plan(sized(16), on(CARD, row(sized(1024), 0.95), row(sized(16_384), 0.95))).path == "torch"


def test_nothing_follows_for_another_kind_of_call() -> None:
    device = on(CARD, row(FFN))
    for other in (sized(4096, gated=False), sized(4096, needs_data_gradient=False, needs_weight_gradient=False),
                  sized(4096, dtype="float32")):  # fmt: skip
        made = plan(other, device)
        assert made.path == "torch"
        assert "float32" in made.why_torch(device) or "nothing like it was measured" in made.why_torch(device)


def test_a_loss_between_two_wins_keeps_both_sides_apart() -> None:
    reduction = ReduceProblem(8, 1024, 1024, 64, "bfloat16", "max")
    rows = [
        row(replace(reduction, batch=batch), ratio, path="fused") for batch, ratio in ((1, 0.7), (16, 1.4), (256, 0.7))
    ]
    paths = {batch: plan(replace(reduction, batch=batch), on(CARD, *rows)).path for batch in (1, 16, 256)}
    assert paths == {1: "fused", 16: "torch", 256: "fused"}


def test_the_users_own_times_count_more_than_those_of_the_architecture() -> None:
    reduction = ReduceProblem(64, 1024, 4096, 64, "bfloat16", "max", captured=True)
    assert plan(reduction, H200).path == "fused"
    assert plan(reduction, on(H200, row(reduction, 1.5, path="fused"))).path == "torch"
    # What they do not speak of is decided as before.
    other = replace(reduction, op="logsumexp")
    assert plan(other, on(H200, row(reduction, 1.5, path="fused"))) == plan(other, H200)


def test_a_sum_without_a_product_stays_one() -> None:
    reduction = ReduceProblem(8, 1024, 1024, 64, "bfloat16", "sum")
    assert plan(reduction, CARD).path == "algebraic"


def test_what_failed_the_self_test_later_is_not_taken() -> None:
    device = on(CARD, row(FFN))
    [name, *_] = planning.configurations(plan(FFN, device))["forward_tiles"]
    assert plan(FFN, replace(device, avoided=frozenset({name}))).path == "torch"


def test_never_is_only_said_where_nothing_was_measured() -> None:
    single = replace(FFN, dtype="float32")
    assert "not measured on sm_86" in str(planning.why_never_kernels(FFN, CARD, "auto"))
    device = on(CARD, row(FFN))
    assert planning.why_never_kernels(FFN, device, "auto") is None
    assert "float32 products" in str(planning.why_never_kernels(single, device, "auto"))
    assert planning.why_never_kernels(single, on(CARD, row(single)), "auto") is None
    assert "float32 products" in str(planning.why_never_kernels(single, H200, "auto"))


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
    first, second = row(FFN, 0.81234), row(sized(64), 1.1)
    assert calibrations.add(CARD, [first], "555.1") == cache
    assert calibrations.add(CARD, [second], "555.2") == cache
    found = calibrations.on_record(CARD)
    assert [*found.rows()] == [first, second]
    # Nothing but its lock is left beside it, and it says where its figures hold.
    assert {path.name for path in cache.parent.iterdir()} == {"calibration.json", "calibration.lock"}
    [record] = json.loads(cache.read_text())["records"]
    assert (record["gpu"], record["processors"], record["driver"]) == ("Some Card", 82, "555.2")
    assert record["torch"] == torch.__version__
    assert "Triton" in record["compiler"]
    assert all(len(each["hash"]) == 16 for each in record["entries"])
    # What is measured again replaces what was there.
    again = row(FFN, 1.2)
    calibrations.add(CARD, [again], None)
    found = calibrations.on_record(CARD)
    assert [*found.rows()] == [again, second]


@pytest.mark.parametrize("field", ["gpu", "processors", "torch", "compiler", "sources"])
def test_figures_hold_for_one_gpu_and_the_versions_they_were_measured_with(
    field: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrations.add(CARD, [row(FFN)], None)
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
    calibrations.add(CARD, [row(FFN)], None)
    monkeypatch.setattr(calibrations, "toolchain", lambda architecture: "Triton 9, ptxas 13.0")
    calibrations.add(CARD, [row(sized(64))], None)
    found = calibrations.on_record(CARD)
    assert len(found) == 2
    [record] = json.loads(cache.read_text())["records"]
    assert record["toolchain"] == "Triton 9, ptxas 13.0"


def test_an_entry_that_was_edited_is_not_trusted(cache: Path) -> None:
    calibrations.add(CARD, [row(FFN), row(sized(64), 1.4)], None)
    content = json.loads(cache.read_text())
    [slow] = [each for each in content["records"][0]["entries"] if each["sizes"][0] == 64]
    slow["launched"]["generic"] = 1e-5
    cache.write_text(json.dumps(content))
    found = calibrations.on_record(CARD)
    assert [*found.rows()] == [row(FFN)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a calibration of schema 2"),
        ('{"schema": 1, "records": []}', "expected a calibration of schema 2"),
        ('{"schema": 2, "records": [{"gpu": "x"}]}', "is no complete calibration"),
        ('{"schema": 2, "records": 3}', "is no complete calibration"),
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
    calibrations.add(CARD, [row(FFN)], None)
    assert calibrations.on_record(CARD) is not None


def test_teams_merge_what_each_has_measured(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing was measured here yet"):
        calibrations.export(tmp_path / "none.json")
    team = tmp_path / "shared" / "team.json"
    calibrations.add(CARD, [row(FFN, 0.9), row(sized(64), 0.7)], None)
    calibrations.add(replace(CARD, name="Another Card"), [row(FFN)], None)
    assert calibrations.export(team) == 3
    # Another machine, with a file of its own: what it measured itself stays.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    calibrations.add(CARD, [row(FFN, 0.6)], None)
    content = json.loads(team.read_text())
    content["records"][1]["entries"][0]["launched"]["torch"] = 9.0
    team.write_text(json.dumps(content))
    assert calibrations.merge([team]) == (1, 1)
    found = calibrations.on_record(CARD)
    assert [*found.rows()] == [row(FFN, 0.6), row(sized(64), 0.7)]
    assert calibrations.merge([team]) == (0, 1)


def test_a_device_is_described_with_what_was_measured_on_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "interpreted", lambda: True)
    cpu = torch.device("cpu")
    facts = devices.describe(cpu)
    assert facts.calibration is None
    calibrations.add(facts, [row(FFN)], None)
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
