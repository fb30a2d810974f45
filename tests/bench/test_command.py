"""The command of the benchmark: it verifies first, refuses to time on red, and its record is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import reference
from fusedlayers.bench import __main__ as command
from fusedlayers.bench import arguments, record, runner, tables, timing
from fusedlayers.bench.cases import CASES, Options
from fusedlayers.bench.record import Record

FFN, GEMM_GEMM, WEIGHT_GRADIENT = CASES["ffn"], CASES["gemm_gemm"], CASES["weight_gradient"]


def bench(*words: object) -> int:
    return command.main([str(word) for word in words])


def run_small(tmp_path: Path, *words: object) -> tuple[int, Record]:
    """The exit status and the record of ``ffn`` on one small shape on the CPU."""
    status = bench("ffn", "--device", "cpu", "--shape", "70x24x40", "--output", tmp_path, *words)
    return status, record.read(tmp_path / "ffn-fp32-cpu.json")


def test_verify_time_record_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_small(tmp_path, "--time", "--seconds", 0.01)
    assert status == 0
    printed = capsys.readouterr().out
    assert "no GPU is used: verifying and timing the torch path on the CPU" in printed
    assert "auto (torch path): green" in printed
    assert printed.index("verify ffn 70×24×40") < printed.index("time   ffn 70×24×40")
    assert [row["direction"] for row in found["rows"]] == ["forward", "forward_backward"]
    assert "speed-up over the best of torch" in printed


def test_one_operation_is_timed_before_the_next_is_verified(tmp_path: Path) -> None:
    """So a run that is cut off has the times of the first ones."""
    grids = [(case, case.grids[0]) for case in (WEIGHT_GRADIENT, GEMM_GEMM)]
    rows = [runner.Row(case, grid, grid.options, grid.shapes_without_gpu[0]) for case, grid in grids]
    settings = runner.Settings(
        "fp32", torch.device("cpu"), timed=True, directions=("forward",), contenders=("auto",), seconds=0.01
    )
    said: list[str] = []
    found, right = runner.run(rows, settings, [], tmp_path / "record.json", said.append)
    assert right
    steps = [line.split()[:2] for line in said if not line.startswith(" ")]
    assert steps == [[verb, row.grid.name] for row in rows for verb in ("verify", "time")]
    assert [row["contenders"]["auto"]["status"] for row in found["rows"]] == ["timed", "timed"]


def test_a_case_without_a_backward_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = bench("weight_gradient", "--device", "cpu", "--shape", "70x24x40", "--output", tmp_path, "--time",
                   "--seconds", 0.01)  # fmt: skip
    assert status == 0
    assert "auto (torch path): green, share of the limit used: dw" in capsys.readouterr().out
    [row] = record.read(tmp_path / "weight_gradient-fp32-cpu.json")["rows"]
    assert row["direction"] == "forward"
    assert row["flops"] == 2 * 70 * 24 * 40
    assert row["bytes"] == 4 * (70 * 24 + 70 * 40 + 24 * 40 + 24)


def test_the_record_has_every_field_of_its_schema(tmp_path: Path) -> None:
    _, found = run_small(tmp_path, "--time", "--seconds", 0.01, "--commit", "abc", "--no-bias")
    assert set(found) == {
        "schema", "arguments", "started", "finished", "commit", "dirty", "source_sha256", "versions", "device",
        "method", "rows",
    }  # fmt: skip
    assert found["schema"] == 1
    assert (found["commit"], found["dirty"]) == ("abc", None)
    assert found["started"] <= found["finished"]
    assert found["arguments"][:2] == ["ffn", "--device"]
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"fusedlayers", "python", "torch", "cuda", "triton", "ptxas"}
    facts = ("kind", "name", "architecture", "driver", "memory_bytes", "l2_bytes", "ceilings")
    assert set(found["device"]) == set(facts)
    row = found["rows"][1]
    assert set(row) == {
        "case", "grid", "title", "letters", "meaning", "shape", "dtype", "activation", "gated", "bias", "recompute",
        "dropout_p", "op", "dim", "skewed",
        "direction", "flops", "bytes", "floor_seconds", "verification", "clocks", "contenders",
    }  # fmt: skip
    assert (row["case"], row["shape"], row["dtype"], row["bias"]) == ("ffn", [70, 24, 40], "fp32", False)
    assert row["flops"] == 6 * 2 * 70 * 24 * 40
    moved = [70 * 24, 40 * 24, 24 * 40, 70 * 24]  # x, w_up, w_down, y
    assert row["bytes"] == 4 * (sum(moved) + sum(moved) + sum(moved[:3]))
    eager = row["contenders"]["torch eager"]
    assert set(eager) == {
        "status", "reason", "path", "replayed_path", "launched", "replayed", "host_seconds", "host_bound", "tflops",
        "floor_share", "saved_bytes", "peak_bytes",
    }  # fmt: skip
    assert eager["launched"]["repeats"] >= timing.FEWEST_ROUNDS
    assert 0 < eager["launched"]["minimum"] <= eager["launched"]["first_quartile"] <= eager["launched"]["median"]
    assert eager["launched"]["median"] <= eager["launched"]["third_quartile"]
    assert eager["replayed"] is None
    assert eager["reason"] == "no CUDA graphs on this device"
    assert eager["tflops"] == pytest.approx(row["flops"] / eager["launched"]["median"] / 1e12)
    auto = row["verification"][0]
    assert (auto["contender"], auto["path"], auto["status"]) == ("auto", "torch", "green")
    assert [finding["tensor"] for finding in auto["findings"]] == ["y", "dx", "dw_up", "dw_down"]
    assert auto["findings"][0]["worst_fraction"] < 1


def one_row_wrong(*tensors: Tensor, **keywords: Any) -> Tensor:
    y = reference.ffn(*tensors, **keywords)
    return torch.cat([y[:-1], 2 * y[-1:]])


class _DoubledWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def weight_gradient_wrong(*, w_down: Tensor, **keywords: Any) -> Tensor:
    return reference.ffn(w_down=_DoubledWeightGradient.apply(w_down), **keywords)


def raises(**keywords: Any) -> Tensor:
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (one_row_wrong, "y: NOT close"),
        (weight_gradient_wrong, "dw_down: NOT close"),
        (raises, "RuntimeError: an illegal memory access"),
    ],
)
def test_red_means_no_timing_and_exit_status_1(
    faulty: Callable[..., Tensor],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(CASES, "ffn", dataclasses.replace(FFN, ours=faulty))
    monkeypatch.setattr(runner, "measure", lambda *args, **kwargs: pytest.fail("timed although red"))
    status, found = run_small(tmp_path, "--time")
    assert status == 1
    printed = capsys.readouterr()
    assert said in printed.out
    assert "verification is RED: nothing is timed" in printed.err
    assert [row["contenders"] for row in found["rows"]] == [{}]
    assert found["rows"][0]["verification"][0]["status"] == "red"


def test_one_red_row_stops_the_timing_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_for_wide(*, x: Tensor, **keywords: Any) -> Tensor:
        return reference.ffn(x, **keywords) * (1.0 if x.shape[-1] < 32 else 1.01)

    monkeypatch.setitem(CASES, "ffn", dataclasses.replace(FFN, ours=wrong_for_wide))
    monkeypatch.setattr(runner, "measure", lambda *args, **kwargs: pytest.fail("timed although red"))
    status, found = run_small(tmp_path, "--shape", "70x33x40", "--time")
    assert status == 1
    assert [row["verification"][0]["status"] for row in found["rows"]] == ["green", "red"]


def test_operations_that_are_right_are_timed_beside_a_red_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = dataclasses.replace(FFN, ours=one_row_wrong)
    rows = [
        runner.Row(case, case.grids[0], case.grids[0].options, case.grids[0].shapes_without_gpu[-1])
        for case in (wrong, WEIGHT_GRADIENT)
    ]
    settings = runner.Settings("fp32", torch.device("cpu"), timed=True, contenders=("auto",), seconds=0.01)
    status = runner.report(rows, settings, [], tmp_path / "record.json")
    assert status == 1
    assert "verification is RED: its operation is not timed" in capsys.readouterr().err
    [path] = tmp_path.glob("*.json")
    timed = {row["case"] for row in record.read(path)["rows"] if row["contenders"]}
    assert timed == {"weight_gradient"}


def test_without_time_nothing_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_small(tmp_path, "--verify")
    assert status == 0
    assert "verification is green" in capsys.readouterr().out
    assert [row["contenders"] for row in found["rows"]] == [{}]


def test_a_spent_budget_is_recorded_and_not_shown_as_times(tmp_path: Path) -> None:
    _, found = run_small(tmp_path, "--time", "--seconds", 0.01, "--budget", 1e-9, "--contenders", "eager,auto")
    entries = [entry for row in found["rows"] for entry in row["contenders"].values()]
    assert len(entries) == 4
    assert {(entry["status"], entry["reason"]) for entry in entries} == {
        ("not timed", "the budget of 1e-09 s was spent")
    }
    assert tables.timed_rows(found) == []


def test_a_contender_that_fails_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: raises)
    _, found = run_small(tmp_path, "--time", "--seconds", 0.01, "--contenders", "compile,eager,fused")
    entries = found["rows"][0]["contenders"]
    assert entries["torch.compile"]["status"] == "not timed"
    assert entries["torch.compile"]["reason"] == "RuntimeError: an illegal memory access"
    assert entries["fused"]["status"] == "not timed"
    assert entries["torch eager"]["status"] == "timed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["ffn", "--shape", "12x13"],
            "argument --shape: '12x13': expected 3 positive integers MxKxN (tokens × d_model",
        ),
        (
            ["gemm_gemm", "--shape", "1x2x3x4x0"],
            "argument --shape: '1x2x3x4x0': expected 5 positive integers BxMxNxKxO",
        ),
        (["ffn", "--shape", "12x-3x4"], "argument --shape"),
        (["ffn", "--activation", "swoosh"], "argument --activation: activation 'swoosh' is not known"),
        (["ffn", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["ffn", "--init", "ones"], "argument --init: invalid choice: 'ones'"),
        (["ffn", "--time", "--init", "zeros"], "argument --init: zeros: --time needs random data: normal or uniform"),
        (["ffn", "--init", "integer", "--activation", "gelu"], "argument --activation: gelu: --init integer"),
        (["ffn", "--contenders", "auto,lion"], "argument --contenders: 'lion': expected names out of eager,compile"),
        (["ffn", "--seed", "1" * 20], "argument --seed: '11111111111111111111': expected an integer of 64 bits"),
        (["ffn", "--seconds", "inf"], "argument --seconds: 'inf': expected more than 0 seconds"),
        (["ffn", "--seconds", "0"], "argument --seconds: '0': expected more than 0 seconds"),
        (["ffn", "--budget", "soon"], "argument --budget: 'soon': expected a number of seconds"),
        (["ffn", "--device", "cuda:99"], "argument --device: 'cuda:99': there are"),
        (["ffn", "--device", "gpu"], "argument --device: 'gpu': expected cuda, cuda:N or cpu"),
        (["gemm_gemm", "--gated"], "unrecognized arguments: --gated"),
        (["gemm_gemm", "--op", "max"], "unrecognized arguments: --op"),
        (["gemm_reduce", "--op", "median"], "argument --op: invalid choice: 'median'"),
        (["gemm_reduce", "--dim", "0"], "argument --dim: invalid choice: 0"),
        (["gemm_reduce", "--op", "mean", "--init", "integer"], "argument --op: mean: --init integer takes"),
        (["weight_gradient", "--activation", "relu"], "unrecognized arguments: --activation relu"),
        (["ffn", "--contenders", "liger"], "argument --contenders: 'liger': expected names out of eager,compile"),
        (["softmax"], "argument NAME: invalid choice: 'softmax'"),
        ([], "the following arguments are required: NAME"),
    ],
)
def test_a_bad_command_line_names_the_argument(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = ["--output", str(tmp_path)] if words else []
    with pytest.raises(SystemExit) as stopped:
        command.main(words + output)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_switch_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "bogus")
    with pytest.raises(SystemExit) as stopped:
        bench("ffn", "--device", "cpu", "--output", tmp_path)
    assert stopped.value.code == 2
    assert "FUSEDLAYERS_BACKEND is 'bogus'; expected one of auto, triton, torch" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as stopped:
        bench("ffn", "--device", "cpu", "--output", file / "records")
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert f"argument --output: '{file}/records'; expected a folder that files can be written into" in printed.err


def test_shapes_are_read_with_either_cross() -> None:
    assert arguments.parse_shape("65536×256×1024", FFN.letters, FFN.meaning) == (65536, 256, 1024)
    assert arguments.parse_shape("2X3x4x5x6", GEMM_GEMM.letters, "") == (2, 3, 4, 5, 6)


def rows_of(*words: str) -> list[runner.Row]:
    chosen = command.build_parser().parse_args(list(words))
    return command._rows(chosen, arguments.settings_of(chosen))


def test_without_a_shape_the_grid_is_run() -> None:
    plain, *_ = FFN.grids
    assert [row.shape for row in rows_of("ffn", "--device", "cpu")] == list(plain.shapes_without_gpu)
    assert {row.options for row in rows_of("ffn", "--device", "cpu")} == {Options("gelu_tanh", bias=True)}
    assert {row.options for row in rows_of("ffn", "--gated", "--device", "cpu")} == {Options("silu", gated=True)}
    integer = rows_of("ffn", "--init", "integer", "--device", "cpu")[0]
    assert (integer.options.activation, integer.grid.title) == ("relu", "ffn, relu, bias")
    other = rows_of("ffn", "--gated", "--bias", "--recompute", "--activation", "swish", "--device", "cpu")[0]
    assert other.options == Options("silu", gated=True, bias=True, recompute=True)
    assert other.grid.title == "gated ffn, silu, bias, recompute=True"


def test_the_grids_of_a_reduction() -> None:
    """Those of the operation and the axis that are named, and the first shapes for one that is not published."""
    case = CASES["gemm_reduce"]
    assert case.published() == case.grids
    assert [(grid.options.op, grid.options.dim) for grid in case.published(op="max")] == [("max", -2), ("max", -1)]
    (row, *_) = rows_of("gemm_reduce", "--op", "absmax", "--dim", "-1", "--device", "cpu")
    assert (row.options.op, row.options.dim) == ("absmax", -1)
    assert row.grid.title == "gemm_reduce, identity, absmax over N"
    assert row.shape == case.grids[0].shapes_without_gpu[0]


def test_where_nothing_was_timed_that_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run_small(tmp_path, "--time", "--seconds", 0.01, "--contenders", "fused")
    assert status == 1
    assert "error: nothing was timed: fused: " in capsys.readouterr().err
