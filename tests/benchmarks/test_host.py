"""What a layer costs the host: the loops, their verification, the record, and what passes its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import chains, host, host_tables, records
from benchmarks.chains import STANDS
from fusedlayers.bench import record, timing
from fusedlayers.modules import FusedFFN

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


def bench(*words: object) -> int:
    return host.main([str(word) for word in words])


def small(tmp_path: Path, *words: object) -> tuple[int, record.Record]:
    status = bench("--device", "cpu", "--depth", 2, "--seconds", 0.01, "--output", tmp_path, *words)
    path = tmp_path / "host-fp32-cpu.json"
    return status, record.read(path) if path.exists() else {}


@pytest.mark.parametrize("name", STANDS)
def test_all_makers_compute_the_same_with_the_same_parameters(name: str) -> None:
    stand = STANDS[name]
    (shape,) = stand.grid.shapes_without_gpu
    layers = stand.layers(shape, 3, **CPU)
    width, columns = stand.widths(shape)
    x = torch.randn(shape[0], width)
    expected = [unit(x) for unit in stand.units(layers[chains.TORCH])]
    assert expected[0].shape == (shape[0], columns)
    assert len(expected) == (1 if stand.chained else 3)
    for maker in stand.makers[1:]:
        for found, right in zip(stand.units(layers[maker]), expected, strict=True):
            torch.testing.assert_close(found(x), right)
    ours, theirs = (
        {id(parameter) for layer in layers[maker] for parameter in layer.parameters()}  # type: ignore[attr-defined]
        for maker in (chains.MODULE, chains.TORCH)
    )
    assert ours == theirs


def test_a_chain_is_residual() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert torch.equal(chains.Residual([Double(), Double()])(torch.ones(1)), torch.tensor([9.0]))


@pytest.mark.parametrize("threads", [True, False])
def test_a_loop_gives_all_gradients_or_none(threads: bool) -> None:
    stand = STANDS["ffn"]
    layers = stand.layers((5, 8, 12), 2, **CPU)[chains.TORCH]
    x, upstream = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)
    parameters = host._parameters(layers)
    loop = chains.Loop(x, upstream, parameters, 2, backward=True)
    seen: list[bool] = []
    layers[0].register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda *_: seen.append(torch.autograd.is_multithreading_enabled())
    )
    run = loop.over(stand.units(layers), threads=threads)
    loop.run_all(run)
    once = [leaf.grad for leaf in loop.leaves]
    loop.run_all(run)
    for leaf, gradient in zip(loop.leaves, once, strict=True):
        assert torch.equal(leaf.grad, gradient)
    assert seen == [threads] * 2
    loop.forget()
    without = chains.Loop(x.detach(), upstream, parameters, 2, backward=False)
    without.run_all(without.over(stand.units(layers), threads=threads))
    assert all(leaf.grad is None for leaf in loop.leaves)


def test_verify_time_record_plot_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    status, found = small(tmp_path, "--plot")
    assert status == 0
    printed = capsys.readouterr().out
    assert "auto (torch path): green, share of the limit used: y" in printed
    assert printed.index("verify linear 8×16×64") < printed.index("time   ffn 64×32×48")
    assert (tmp_path / "host-fp32-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["grid"], row["direction"]) for row in found["rows"]] == [
        (name, direction) for name in STANDS for direction in ("forward_backward", "forward")
    ]
    with_gradients, without, *_ = (row["contenders"] for row in found["rows"])
    assert list(without) == ["torch", "auto", "kernels"]
    assert list(with_gradients) == [*without, *(f"{name}, one thread" for name in without)]
    assert list(found["rows"][4]["contenders"])[:4] == ["torch", "auto", "kernels", "function"]
    assert with_gradients["kernels"]["reason"] == "the interpreter's time means nothing"
    auto = with_gradients["auto, one thread"]
    assert (auto["status"], auto["path"], auto["host_bound"], auto["replayed"]) == ("timed", "torch", False, None)
    assert auto["launched"]["repeats"] >= timing.FEWEST_ROUNDS
    assert found["finished"] is not None
    assert {(row["depth"], row["dtype"]) for row in found["rows"]} == {(2, "fp32")}
    assert records.main(["table", str(tmp_path / "host-fp32-cpu.json")]) == 0
    assert capsys.readouterr().out == host_tables.markdown(found)
    assert records.main(["plot", str(tmp_path / "host-fp32-cpu.json")]) == 0


def test_what_is_chosen_is_what_runs(tmp_path: Path) -> None:
    words = ("--grid", "linear", "--shape", "3x8x16", "--contenders", "torch,function", "--direction", "forward")
    _, found = small(tmp_path, *words)
    (row,) = found["rows"]
    assert (row["grid"], row["shape"], list(row["contenders"])) == ("linear", [3, 8, 16], ["torch", "function"])


def test_compiled_chains_are_timed_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda unit, **options: compiled.append(unit) or unit)
    _, found = small(tmp_path, "--grid", "ffn", "--compiled", "--direction", "forward")
    assert list(found["rows"][0]["contenders"])[-2:] == ["torch, compiled", "auto, compiled"]
    assert len(compiled) == 2


def test_layers_run_under_autocast_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, inputs and gradients are float32, products are not; a record of its own says so."""
    seen: set[tuple[torch.dtype, torch.dtype, bool]] = set()
    product = torch.nn.functional.linear

    def noting(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        y = product(x, weight, *rest)
        seen.add((weight.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
        return y

    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    status, found = small(tmp_path, "--autocast")
    assert (status, found) == (0, {})
    path = tmp_path / "host-autocast-bf16-cpu.json"
    found = record.read(path)
    assert {(row["dtype"], row["autocast"]) for row in found["rows"]} == {("bf16", True)}
    assert len(found["rows"]) == 2 * len(STANDS)
    # In float64 the truth is computed, without autocast.
    assert {each for each in seen if each[0] != torch.float64} == {(torch.float32, torch.bfloat16, True)}
    capsys.readouterr()
    assert records.main(["table", str(path)]) == 0
    assert ": float32 layers under autocast, medians" in capsys.readouterr().out


def test_red_means_no_timing_and_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = FusedFFN.forward
    monkeypatch.setattr(FusedFFN, "forward", lambda self, x, residual=None: 1.01 * right(self, x, residual))
    monkeypatch.setattr(host, "measure", lambda *args, **kwargs: pytest.fail("timed although red"))
    status, found = small(tmp_path)
    assert (status, found) == (1, {})
    printed = capsys.readouterr()
    assert "auto (torch path): RED: y: NOT close" in printed.out
    assert "verification is RED: nothing is timed" in printed.err


def test_a_wrong_gradient_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FusedFFN.forward

    def wrong(self: FusedFFN, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.down_proj.bias
        return right(self, x, residual) + (bias.detach() - bias)

    monkeypatch.setattr(FusedFFN, "forward", wrong)
    (shape,) = STANDS["ffn"].grid.shapes_without_gpu
    row, precision = host.Row(STANDS["ffn"], shape), host.Precision("fp32")
    (found,) = host.verify(row, ("torch", "auto"), precision, torch.device("cpu"), 0)
    assert [finding.tensor for finding in found.findings if not finding.ok] == ["ddown_proj.bias"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "1x2x3"], "argument --shape: expected it beside --grid with one name"),
        (["--grid", "ffn", "--shape", "1x2"], "argument --shape: '1x2': expected 3 positive integers MxKxN"),
        (["--grid", "rnn"], "argument --grid: 'rnn': expected names out of ffn,gated_ffn,linear"),
        (["--autocast", "--dtype", "fp32"], "argument --dtype: fp32: expected bf16 or fp16 beside --autocast"),
        (["--plot", "--verify"], "argument --plot: expected no --verify beside it"),
        (["--output", f"{__file__}/records"], "expected a folder that files can be written into"),
        (["--depth", "0"], "argument --depth: 0: expected 1 layer or more"),
        (["--contenders", "auto,liger"], "argument --contenders: 'liger': expected names out of torch,auto"),
    ],
)
def test_a_bad_command_line_names_the_argument(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench("--device", "cpu", "--output", tmp_path, *words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def timed(microseconds: float, over_torch: float = 1.0, host_bound: bool = True) -> dict[str, Any]:
    spread = {"median": microseconds / 1e6}
    return {
        "status": "timed", "launched": spread, "replayed": None, "host_seconds": 1e-6, "host_bound": host_bound,
        "over_torch": over_torch,
    }  # fmt: skip


def test_ratios_are_of_their_kind_and_limits_hold_where_the_host_decides() -> None:
    contenders = {
        "torch": timed(100), "auto": timed(104, 1.04), "kernels": timed(109, 1.09), "torch, one thread": timed(50),
        "auto, one thread": timed(51, 1.02), "kernels, one thread": timed(56, 1.12),
    }  # fmt: skip
    row: Any = {"grid": "ffn", "shape": [1, 2, 3], "direction": "forward_backward", "contenders": contenders}
    found: Any = {
        "rows": [row, {**row, "contenders": {"torch": timed(100), "auto": timed(200, 2.0, host_bound=False)}}]
    }
    assert host_tables.over_torch(row, "kernels, one thread") == pytest.approx(1.12)
    assert host_tables.over_limits(found) == [
        "ffn 1×2×3 f+b, auto: 1.04 of torch's time, at most 1.03",
        "ffn 1×2×3 f+b, kernels, one thread: 1.12 of torch's time, at most 1.10",
    ]
    row["direction"] = "forward"
    assert len(host_tables.over_limits(found)) == 4
    shown = host_tables.table(found)
    assert shown.rows[0][3:6] == ("100*", "104* (1.04)", "109* (1.09)")
    assert shown.rows[1][4] == "200 (2.00)"
