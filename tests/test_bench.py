"""The benchmark: it verifies first and refuses to time on red, its record is complete, and tables and plots follow it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import reference
from fusedlayers.bench import __main__ as command
from fusedlayers.bench import cases, contenders, plots, record, runner, tables, timing, verification
from fusedlayers.bench.cases import CASES, Options
from fusedlayers.bench.memory import saved_bytes
from fusedlayers.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
FFN, GEMM_GEMM = CASES["ffn"], CASES["gemm_gemm"]
PLAIN = Options("gelu_tanh", bias=True)


def bench(*words: object) -> int:
    return command.main([str(word) for word in words])


def run_small(tmp_path: Path, *words: object) -> tuple[int, Record]:
    """The exit status and the record of ``ffn`` on one small shape on the CPU."""
    status = bench("ffn", "--device", "cpu", "--shape", "70x24x40", "--output", tmp_path, *words)
    return status, record.read(tmp_path / "ffn-fp32-cpu.json")


# The command, from verification to record


def test_verify_time_record_plot_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    status, found = run_small(tmp_path, "--time", "--seconds", 0.01, "--plot")
    assert status == 0
    printed = capsys.readouterr().out
    assert "no GPU is used: verifying and timing the torch path on the CPU" in printed
    assert "auto (torch path): green" in printed
    assert printed.index("verify ffn 70×24×40") < printed.index("time   ffn 70×24×40")
    assert (tmp_path / "ffn-fp32-cpu-ffn.png").read_bytes().startswith(b"\x89PNG")
    assert [row["direction"] for row in found["rows"]] == ["forward", "forward_backward"]
    assert bench("table", tmp_path / "ffn-fp32-cpu.json") == 0
    assert capsys.readouterr().out == tables.markdown(found)


def test_the_record_has_every_field_of_its_schema(tmp_path: Path) -> None:
    _, found = run_small(tmp_path, "--time", "--seconds", 0.01, "--commit", "abc", "--no-bias")
    assert set(found) == {
        "schema", "arguments", "started", "finished", "commit", "dirty", "source_sha256", "versions", "device", "method",
        "rows",
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
        "direction", "flops", "bytes", "floor_seconds", "verification", "clocks", "contenders",
    }  # fmt: skip
    assert (row["case"], row["shape"], row["dtype"], row["bias"]) == ("ffn", [70, 24, 40], "fp32", False)
    assert row["flops"] == 6 * 2 * 70 * 24 * 40
    moved = [70 * 24, 40 * 24, 24 * 40, 70 * 24]  # x, w_up, w_down, y
    assert row["bytes"] == 4 * (sum(moved) + sum(moved) + sum(moved[:3]))
    eager = row["contenders"]["torch eager"]
    assert set(eager) == {
        "status", "reason", "path", "launched", "replayed", "host_seconds", "host_bound", "tflops", "floor_share",
        "saved_bytes", "peak_bytes",
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


def one_row_wrong(*tensors: Tensor, recompute: object, **keywords: Any) -> Tensor:
    y = reference.ffn(*tensors, **keywords)
    return torch.cat([y[:-1], 2 * y[-1:]])


class _DoubledWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def weight_gradient_wrong(*, w_down: Tensor, recompute: object, **keywords: Any) -> Tensor:
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
    def wrong_for_wide(*, x: Tensor, recompute: object, **keywords: Any) -> Tensor:
        return reference.ffn(x, **keywords) * (1.0 if x.shape[-1] < 32 else 1.01)

    monkeypatch.setitem(CASES, "ffn", dataclasses.replace(FFN, ours=wrong_for_wide))
    monkeypatch.setattr(runner, "measure", lambda *args, **kwargs: pytest.fail("timed although red"))
    status, found = run_small(tmp_path, "--shape", "70x33x40", "--time")
    assert status == 1
    assert [row["verification"][0]["status"] for row in found["rows"]] == ["green", "red"]


def test_without_time_nothing_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_small(tmp_path, "--verify")
    assert status == 0
    assert "verification is green" in capsys.readouterr().out
    assert [row["contenders"] for row in found["rows"]] == [{}]
    assert bench("table", tmp_path / "ffn-fp32-cpu.json") == 1
    assert "the record holds no times" in capsys.readouterr().err


def test_a_spent_budget_is_recorded_and_not_shown_as_times(tmp_path: Path) -> None:
    status, found = run_small(
        tmp_path, "--time", "--seconds", 0.01, "--budget", 1e-9, "--contenders", "eager,auto"
    )  # fmt: skip
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


# The command line


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
        (["ffn", "--contenders", "auto,liger"], "argument --contenders: 'liger': expected names out of eager,compile"),
        (["ffn", "--seconds", "0"], "argument --seconds: '0': expected more than 0 seconds"),
        (["ffn", "--budget", "soon"], "argument --budget: 'soon': expected a number of seconds"),
        (["ffn", "--device", "cuda:99"], "argument --device: 'cuda:99': there are"),
        (["ffn", "--device", "gpu"], "argument --device: 'gpu': expected cuda, cuda:N or cpu"),
        (["gemm_gemm", "--gated"], "unrecognized arguments: --gated"),
        (["all", "--shape", "1x2x3"], "unrecognized arguments: --shape"),
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


def test_shapes_are_read_with_either_cross() -> None:
    assert command.parse_shape("65536×256×1024", FFN) == (65536, 256, 1024)
    assert command.parse_shape("2X3x4x5x6", GEMM_GEMM) == (2, 3, 4, 5, 6)


def rows_of(*words: str) -> list[runner.Row]:
    chosen = command.build_parser().parse_args(list(words))
    return command._rows(chosen, command._settings(chosen))


def test_without_a_shape_the_grid_is_run() -> None:
    plain, gated = FFN.grids
    assert [row.shape for row in rows_of("ffn", "--device", "cpu")] == list(plain.shapes_without_gpu)
    assert {row.options for row in rows_of("ffn", "--device", "cpu")} == {Options("gelu_tanh", bias=True)}
    assert {row.options for row in rows_of("ffn", "--gated", "--device", "cpu")} == {Options("silu", gated=True)}
    assert {row.grid for row in rows_of("all", "--device", "cpu")} == {plain, gated, *GEMM_GEMM.grids}
    integer = rows_of("ffn", "--init", "integer", "--device", "cpu")[0]
    assert (integer.options.activation, integer.grid.title) == ("relu", "ffn, relu, bias")
    other = rows_of("ffn", "--gated", "--bias", "--recompute", "--activation", "swish", "--device", "cpu")[0]
    assert other.options == Options("silu", gated=True, bias=True, recompute=True)
    assert other.grid.title == "gated ffn, silu, bias, recompute=True"


# Verification


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("case", "options", "shape"),
    [
        (FFN, Options("relu", bias=True), (130, 48, 100)),
        (FFN, Options("relu", gated=True), (130, 48, 100)),
        (GEMM_GEMM, Options("identity"), (2, 70, 130, 24, 40)),
    ],
    ids=["ffn", "gated_ffn", "gemm_gemm"],
)
def test_integer_inputs_stay_exact(case: cases.Case, options: Options, shape: cases.Shape, dtype: str) -> None:
    work, truth = verification.exact_work(case, options, shape, dtype=cases.DTYPES[dtype], device=CPU, seed=0)
    for tensor in (*work.inputs.values(), work.upstream):
        assert set(tensor.unique().tolist()) <= {-2, -1, 0, 1, 2}
    for tensor in truth:
        assert tensor.any()
        assert torch.equal(tensor, tensor.round())
        assert torch.equal(tensor, tensor.to(cases.DTYPES[dtype]).double())
    found = verification.verify(case, options, shape, init="integer", dtype=cases.DTYPES[dtype], device=CPU)
    assert [finding.message for finding in found[0].findings][0] == "y: equal"
    assert found[0].status == "green"


def test_an_integer_result_that_is_off_by_one_is_red() -> None:
    def off_by_one(*, x: Tensor, recompute: object, **keywords: Any) -> Tensor:
        bump = torch.zeros(x.shape[0], 1)
        bump[7] = 1
        return reference.ffn(x, **keywords) + bump

    case = dataclasses.replace(FFN, ours=off_by_one)
    found = verification.verify(case, Options("relu"), (70, 24, 40), init="integer", dtype=torch.float32, device=CPU)
    assert found[0].status == "red"
    assert "y: NOT equal at 24 of 1680 elements, first at (7, 0)" in found[0].summary()


def test_the_exactness_watch_sees_inside_the_computation() -> None:
    """The hidden overflows the integers of bfloat16 although the result does not."""
    with verification._ExactnessWatch(torch.bfloat16) as watch:
        hidden = torch.full((1, 1), 300.0, dtype=torch.float64) * 1
        _ = hidden * 0
    assert not watch.exact
    with verification._ExactnessWatch(torch.bfloat16) as watch:
        _ = torch.full((1, 1), 3.0, dtype=torch.float64) * 0.5
    assert not watch.exact
    with verification._ExactnessWatch(torch.float16) as watch:
        _ = torch.full((1, 1), 300.0, dtype=torch.float64) * 1
    assert watch.exact


def test_integers_that_cannot_stay_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="activation gelu leaves the integers"):
        verification.exact_work(FFN, Options("gelu"), (8, 8, 8), dtype=torch.float32, device=CPU, seed=0)
    # One row of one element: some result is zero at every density.
    with pytest.raises(ValueError, match="no density of non-zero values keeps every step of 1x1x1 exact"):
        for seed in range(50):
            verification.exact_work(FFN, Options("relu"), (1, 1, 1), dtype=torch.float32, device=CPU, seed=seed)


@pytest.mark.parametrize("init", ["normal", "uniform", "zeros"])
def test_every_kind_of_input_verifies(init: str) -> None:
    for options in (PLAIN, Options("silu", gated=True, bias=True), dataclasses.replace(PLAIN, recompute=True)):
        found = verification.verify(FFN, options, (70, 24, 40), init=init, dtype=torch.float32, device=CPU)
        assert found[0].status == "green"
        assert found[0].path == ("chunked" if options.recompute is True else "torch")


@pytest.mark.interpreter
def test_the_forced_kernels_are_verified_too() -> None:
    for init in ("normal", "integer"):
        found = verification.verify(FFN, Options("relu"), (40, 16, 40), init=init, dtype=torch.float32, device=CPU)
        assert [(one.contender, one.path, one.status) for one in found] == [
            ("auto", "torch", "green"),
            ("fused", "fused", "green"),
        ]
    found = verification.verify(FFN, PLAIN, (40, 16, 40), init="normal", dtype=torch.bfloat16, device=CPU)
    assert found[1].summary() == "fused: not run: Triton's interpreter computes bfloat16 products wrongly"


def test_the_users_switches_do_not_decide_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "nonsense")
    monkeypatch.delenv("FUSEDLAYERS_STRICT", raising=False)
    found = verification.verify(FFN, PLAIN, (8, 8, 8), init="normal", dtype=torch.float32, device=CPU)
    assert found[0].status == "green"
    import os

    assert os.environ["FUSEDLAYERS_BACKEND"] == "nonsense"
    assert "FUSEDLAYERS_STRICT" not in os.environ


# Costs, memory and clocks


def test_costs_are_those_of_the_published_floors() -> None:
    """Floors of the published tables in µs, from 790 TFLOP/s and 4.3 TB/s."""
    for case, options, shape, backward, microseconds in (
        (FFN, PLAIN, (131072, 64, 256), False, 11),
        (FFN, PLAIN, (131072, 64, 256), True, 33),
        (FFN, PLAIN, (8192, 4096, 14336), True, 7307),
        (FFN, Options("silu", gated=True), (65536, 256, 768), False, 98),
        (FFN, Options("silu", gated=True), (8192, 4096, 14336), True, 10960),
        (GEMM_GEMM, Options(), (64, 1024, 1024, 64, 64), False, 22),
        (GEMM_GEMM, Options(), (16, 4096, 4096, 128, 128), False, 174),
    ):
        flops = case.flops(shape, options, backward)
        moved = case.moved_bytes(shape, options, torch.bfloat16, backward)
        assert max(flops / 790e12, moved / 4.3e12) * 1e6 == pytest.approx(microseconds, abs=0.5)


def test_saved_bytes_count_each_activation_once_and_no_parameter() -> None:
    rows, width, hidden = shape = (64, 16, 48)
    work = verification.random_work(
        FFN, PLAIN, shape, init="normal", dtype=torch.float32, device=CPU, seed=0, backward=True
    )  # fmt: skip
    eager = contenders.contender(contenders.EAGER, FFN, PLAIN)
    # x, the pre-activation and the hidden.
    assert saved_bytes(eager, work, FFN.parameters) == 4 * rows * (width + 2 * hidden)
    chunked = contenders.contender(contenders.AUTO, FFN, dataclasses.replace(PLAIN, recompute=True))
    assert saved_bytes(chunked, work, FFN.parameters) == 4 * rows * width


class _RecordingClock(timing.Clock):
    """Runs nothing; the k-th measurement takes k seconds."""

    separate_host = True

    def __init__(self) -> None:
        self.order: list[object] = []

    def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
        if "broken" in launch.args[0].__name__:
            return None, "not capturable"
        return launch, ""

    def once(self, run: Callable[[], object]) -> tuple[float, float]:
        self.order.append(run)
        return float(len(self.order)), 0.0


def test_rounds_interleave_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 10)

    def first(**inputs: Tensor) -> Tensor:
        return inputs["x"] * 1

    def broken_second(**inputs: Tensor) -> Tensor:
        return inputs["x"] * 2

    clock = _RecordingClock()
    work = contenders.Work({"x": torch.ones(2)}, torch.ones(2), backward=False)
    entrants = [contenders.Contender("a", first), contenders.Contender("b", broken_second)]
    found = timing.measure(entrants, work, seconds=1e9, clock=clock)
    # Three entrants: a launched, a replayed, b launched.
    rounds = [clock.order[i : i + 3] for i in range(0, len(clock.order), 3)]
    assert len(rounds) == timing.DISCARDED_ROUNDS + 10
    assert [run.args[0].__name__ for run in rounds[0]] == ["first", "first", "broken_second"]
    assert [run.args[0].__name__ for run in rounds[2]] == ["broken_second", "first", "first"]
    a, b = found["a"], found["b"]
    assert isinstance(a, timing.Timing)
    assert isinstance(b, timing.Timing)
    assert (a.replayed is None, b.replayed is None, b.replay_reason) == (False, True, "not capturable")
    assert a.launched.repeats == 10
    assert a.launched.minimum > 3 * timing.DISCARDED_ROUNDS


def test_quartiles_and_the_mark_of_the_host() -> None:
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == timing.Spread(3.0, 2.0, 4.0, 1.0, 5)
    assert timing.spread([2.0]) == timing.Spread(2.0, 2.0, 2.0, 2.0, 1)
    slow, quick = timing.spread([2.0]), timing.spread([1.0])
    assert timing._host_bound(slow, quick, 0.1)
    assert not timing._host_bound(quick, quick, 0.99)
    assert timing._host_bound(quick, None, 0.99)
    assert not timing._host_bound(quick, None, 0.5)


# Tables and plots


def entry(launched: float, replayed: float | None, **fields: Any) -> Record:
    """Times in µs."""
    quick = {"first_quartile": 0.0, "third_quartile": 1.0, "minimum": 0.0, "repeats": 9}
    return {
        "status": "timed", "reason": "", "path": None, "host_seconds": 1e-5, "host_bound": False, "tflops": 1.0,
        "floor_share": 0.5, "saved_bytes": 3 * 2**20, "peak_bytes": 200 * 2**20,
        "launched": {"median": launched * 1e-6, **quick},
        "replayed": None if replayed is None else {"median": replayed * 1e-6, **quick},
    } | fields  # fmt: skip


@pytest.fixture
def gpu_record() -> Record:
    """As a GPU run would leave it: one shape where ours wins, one where torch does."""
    same = record.untimed_entry("same as auto", "auto mode chose the fused kernels", "fused")
    shared = {
        "case": "ffn", "grid": "ffn", "title": "FFN, gelu_tanh, bias", "letters": ["M", "K", "N"],
        "meaning": "tokens × d_model × d_ff", "dtype": "bf16", "activation": "gelu_tanh", "gated": False, "bias": True,
        "recompute": "auto", "direction": "forward_backward", "flops": 10, "bytes": 10, "floor_seconds": 33e-6,
        "verification": [], "clocks": None,
    }  # fmt: skip
    won = {
        "torch eager": entry(416, 400, host_bound=True),
        "torch.compile": entry(917, None),
        "auto": entry(208, 160, path="fused"),
        "fused": same,
    }
    lost = {
        "torch eager": entry(1000, 990),
        "torch.compile": entry(900, 800),
        "auto": entry(1000, 1600, path="torch"),
        "fused": entry(2000, 1900, path="fused"),
    }
    return {
        "schema": 1, "arguments": [], "started": "2026-11-20T10:00:00+00:00", "finished": None, "commit": "c" * 40,
        "dirty": True, "source_sha256": "", "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "device": {"kind": "cuda", "name": "NVIDIA H200"}, "method": {"cold_cache_bytes": 1},
        "rows": [
            shared | {"shape": [131072, 64, 256], "contenders": won},
            shared | {"shape": [8192, 2048, 8192], "contenders": lost},
        ],
    }  # fmt: skip


def test_the_markdown_table_shows_wins_and_losses(gpu_record: Record) -> None:
    text = tables.markdown(gpu_record)
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0, bf16, 2026-11-20, commit cccccccccc with local changes" in text
    assert "**FFN, gelu_tanh, bias: forward + backward, bf16**" in text
    assert (
        "| 131072×64×256 | 416* / 400 | 917 / – | 208 / 160 | fused | same | 2.00 / 2.50 | 50% | 3.0 / 3.0 / 3.0 "
        "| 200 / 200 / 200 |" in text
    )
    assert "| 8192×2048×8192 | 1000 / 990 | 900 / 800 | 1000 / 1600 | torch | 2000 / 1900 | 0.90 / 0.50 |" in text


def test_rows_slower_than_torch_are_named(gpu_record: Record) -> None:
    assert tables.slower_than_torch(gpu_record) == [
        "ffn 8192×2048×8192 forward + backward, launched: 0.90 of torch's speed (torch path)",
        "ffn 8192×2048×8192 forward + backward, replayed: 0.50 of torch's speed (torch path)",
    ]


def test_the_table_on_the_screen_is_narrow(gpu_record: Record) -> None:
    lines = tables.screen(gpu_record).plain().splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 120


def test_plots_are_made_from_the_file(gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.json"
    record.write(gpu_record, path)
    drawn: list[dict[str, list[float | None]]] = []
    draw = plots._bars
    monkeypatch.setattr(plots, "_bars", lambda axes, rows, series, colours: drawn.append(series) or draw(axes, rows, series, colours))  # fmt: skip  # noqa: E501  one expression
    assert bench("plot", path) == 0
    assert (tmp_path / "all-ffn.png").stat().st_size > 10_000
    speed_ups, times = drawn
    assert speed_ups["auto mode, replayed"] == pytest.approx([2.5, 0.5])
    assert speed_ups["forced kernels, replayed"] == [None, pytest.approx(800 / 1900)]
    assert times["torch eager"] == pytest.approx([400 / 33, 990 / 33])
    assert times["torch.compile"] == pytest.approx([917 / 33, 800 / 33])


def test_plots_without_matplotlib_say_what_to_install(
    gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record.write(gpu_record, tmp_path / "all.json")
    assert bench("plot", tmp_path / "all.json") == 1
    assert "plots need matplotlib: pip install 'fusedlayers[examples]'" in capsys.readouterr().err


def test_without_rich_the_table_is_plain(
    gpu_record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    command._print(tables.screen(gpu_record))
    assert capsys.readouterr().out == tables.screen(gpu_record).plain() + "\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("{", "expected a JSON record"), ("{}", "schema 1, got None"), ("[]", "got 'list'")],
)
def test_an_unusable_record_is_named(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    for name in ("table", "plot"):
        assert bench(name, path) == 1
        error = capsys.readouterr().err
        assert str(path) in error
        assert said in error


def test_the_readme_shows_the_committed_results_and_no_others() -> None:
    readme = (ROOT / "README.md").read_text()
    committed = sorted((ROOT / "fusedlayers" / "bench" / "results").glob("*.json"))
    shown = [table for path in committed for table in tables.tables(json.loads(path.read_text()))]
    for table in shown:
        assert table.markdown() in readme, f"README.md lacks or changed the table {table.title!r}"
    # The heading of a results table, in any of its two widths.
    assert readme.count("| torch eager | torch.compile | fusedlayers | path |") == len(shown)
