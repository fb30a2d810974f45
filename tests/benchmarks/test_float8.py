"""The benchmark of layers in 8 bits: its table, what it refuses, and a row without a GPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from benchmarks import float8, float8_layers
from benchmarks.float8_layers import (
    BF16,
    COMPILED,
    FP8,
    KEPT,
    LAYERS,
    SEPARATE,
    TORCH,
    TORCHAO,
    Layer,
    Plain,
    contenders,
    has_torchao,
)
from benchmarks.records import updated
from fusedlayers.bench import record as records
from fusedlayers.bench.timing import Clock
from fusedlayers.functional.switches import switched

CPU = torch.device("cpu")
PEERS_HERE = [TORCHAO] if has_torchao() else []
SMALL = (
    Layer("linear", (64, 32, 48)),
    Layer("linear, weight gradient in 16 bits", (64, 32, 48), recipe="rowwise_with_gw_hp"),
    Layer("FFN, gelu", (64, 32, 48), "gelu"),
    Layer("FFN", (64, 32, 48), "silu", True),
    Layer("FFN, LoRA", (64, 32, 48), "silu", True, 8),
)
EXPERTS = Layer("experts", (64, 32, 48, 4, 2), "silu", True)


def times(**medians: float) -> dict[str, Any]:
    return {
        name: {"median": 1e-6 * time, "first_quartile": 1e-6 * time, "third_quartile": 1e-6 * time}
        for name, time in medians.items()
    }


def record(**changes: Any) -> dict[str, Any]:
    row = {
        "title": "linear", "shape": [64, 32, 48], "direction": "forward",
        "launched": times(torch=110, separate=90, bf16=100, fp8=125), "replayed": times(bf16=80, fp8=40),
        "paths": {"launched": {"bf16": "torch", "fp8": "torch"}, "replayed": {"bf16": "torch", "fp8": "float8"}},
    }  # fmt: skip
    return {
        "rows": [row | changes], "device": {"name": "a GPU"}, "versions": {"torch": "2.11", "triton": "3.6"},
        "started": "2026-01-01T00:00:00", "commit": "0123456789ab",
    }  # fmt: skip


def test_the_table_tells_8_bits_from_16_and_from_separate_quantisation() -> None:
    text = float8.markdown(record())
    assert "| layer | size | pass | torch | separate | bf16 | fp8 | × over bf16 | × over separate | path |" in text
    assert "| linear | 64×32×48 | forward | 110 / – | 90 / – | 100 / 80 | 125 / 40 |" in text
    assert "| 0.80 / 2.00 | 0.72 / – | torch / float8 |" in text
    assert text.endswith("8 bits do not pay here: linear 64×32×48, forward, launched (0.80).\n")
    assert "a GPU, torch 2.11, Triton 3.6, 2026-01-01, commit 0123456789" in text
    assert "*separate*: `torch._scaled_mm`" in text
    assert "Weights kept" not in text


def test_where_8_bits_always_pay_the_table_says_so() -> None:
    kept = times(torch=110, bf16=100, fp8=50) | {KEPT: times(x=40)["x"]}
    text = float8.markdown(record(launched=kept, paths={}))
    assert "| 100 / 80 | 50 / 40 | 40 / – | 2.00 / 2.00 |\n" in text
    assert text.endswith("8 bits are nowhere more than 3 % slower than bf16 here.\n")
    assert "Weights kept" in text
    assert "separate" not in text


def test_with_several_peers_the_table_compares_with_the_faster_one() -> None:
    launched = times(torch=110, separate=90, torchao=60, bf16=100, fp8=50)
    versions = {"torch": "2.11", "triton": "3.6", "torchao": "0.18.0"}
    found = record(launched=launched, replayed=times(separate=50, torchao=70, bf16=80, fp8=40)) | {"versions": versions}
    text = float8.markdown(found)
    assert "| torch | separate | torchao | bf16 | fp8 | × over bf16 | × over best peer | path |" in text
    assert "| 110 / – | 90 / 50 | 60 / 70 | 100 / 80 | 50 / 40 | 2.00 / 2.00 | 1.20 / 1.25 |" in text
    assert "a GPU, torch 2.11, Triton 3.6, torchao 0.18.0, 2026-01-01" in text
    assert "*torchao*: its float8 training" in text
    assert "*Best peer*: the faster of *separate* and *torchao*." in text


def test_rows_are_replaced_by_newer_ones() -> None:
    about = {"method": {}, "finished": "2026-01-02T00:00:00", "dirty": None}
    device, versions = {"name": "a GPU", "ceilings": None}, {"torch": "2.11", "triton": "3.6", "fusedlayers": "0.3.0"}
    older = record() | {"device": device, "versions": versions, **about}
    newer = record(launched=times(torch=110, separate=90, bf16=100, fp8=50)) | {"device": device, "versions": versions}
    newer |= about | {"commit": "ab" * 20}
    text = float8.markdown(updated(older, newer))
    assert "commit 0123456789, 1 of its rows at ababababab: medians" in text
    assert "| 100 / 80 | 50 / 40 |" in text
    [row] = newer["rows"]
    fewer = [row | {"launched": times(torch=110, bf16=100, fp8=50)}]
    with pytest.raises(ValueError, match="with times of torch, separate"):
        updated(older, newer | {"rows": fewer})


def off_by(share: float) -> Any:
    torch.manual_seed(0)
    truth = torch.randn(64, 64)
    return lambda: (truth, truth + share * torch.randn(64, 64))


@pytest.mark.parametrize(
    ("name", "share"), [(FP8, 0.2), (SEPARATE, 0.2), (TORCHAO, 0.2), (BF16, 0.05), (FP8, float("nan"))]
)
def test_a_wrong_contender_is_refused(name: str, share: float) -> None:
    """By any of its results, the first of which has the same bits here."""
    with pytest.raises(ValueError, match=f"{name} is wrong: .* dB beside torch, expected at least"):
        float8.verified({TORCH: off_by(0), name: off_by(share)})


def test_noise_is_that_of_the_worst_result() -> None:
    steps = {TORCH: off_by(0), FP8: off_by(0.1), BF16: off_by(0.01), COMPILED: off_by(0)}
    assert float8.verified(steps) == {FP8: pytest.approx(20, abs=0.2), BF16: pytest.approx(40, abs=0.2), COMPILED: None}


def eagerly(module: nn.Module, **options: object) -> nn.Module:
    assert options == {"fullgraph": True, "dynamic": False}
    return module


@pytest.mark.parametrize("layer", [*SMALL, EXPERTS], ids=[layer.title for layer in (*SMALL, EXPERTS)])
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_row_without_a_gpu(layer: Layer, direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others' quantisation is right, too; and what is measured can be written and shown."""
    monkeypatch.setattr(torch, "compile", eagerly)
    row = float8.measured(layer, direction, Clock(), CPU, 0.01, seed=0)
    # A weight is kept for the backward pass alone.
    peers = [] if layer is EXPERTS else [SEPARATE, *PEERS_HERE]
    compiled = [] if layer is EXPERTS else [COMPILED]
    names = [TORCH, *compiled, *peers, BF16, FP8] + [KEPT] * (direction == "forward_backward")
    assert list(row["launched"]) == names
    assert all(
        found["first_quartile"] <= found["median"] <= found["third_quartile"] for found in row["launched"].values()
    )
    assert row["replayed"] == {}
    assert row["paths"] == {"launched": {BF16: "torch", FP8: "torch"}, "replayed": {}}
    assert row["noise"][FP8] is None
    assert all(row["noise"][name] > 20 for name in peers)
    found = records.new_record([], CPU, {}, "0123456789ab") | {"rows": [row]}
    records.write(found, tmp_path / "record.json")
    assert float8.markdown(records.read(tmp_path / "record.json")) == float8.markdown(found)


@pytest.mark.skipif(not has_torchao(), reason="torchao is not installed: pip install torchao")
@pytest.mark.parametrize("layer", SMALL, ids=[layer.title for layer in SMALL])
def test_torchao_takes_every_linear_layer_but_adapters(layer: Layer) -> None:
    """With the same weights, and ours stays as it was."""
    ours = layer.ours(None, CPU)
    classes = [type(module) for module in ours.modules()]
    found = float8_layers.converted(Plain(ours), layer.recipe)
    linears = {name: module for name, module in found.named_modules() if isinstance(module, nn.Linear)}
    base = {name for name, module in linears.items() if type(module).__name__ == "Float8Linear"}
    assert base
    assert base == {name for name in linears if "adapters" not in name}
    assert {id(weight) for weight in found.parameters()} == {id(weight) for weight in ours.parameters()}
    assert [type(module) for module in ours.modules()] == classes


def test_where_torchao_is_installed_it_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(plain: Plain, recipe: str) -> Plain:
        recipes.append(recipe)
        return plain

    recipes: list[str] = []
    monkeypatch.setattr(torch, "compile", eagerly)
    monkeypatch.setattr(float8_layers, "converted", converted)
    for installed in (True, False):
        monkeypatch.setattr(float8_layers, "has_torchao", lambda installed=installed: installed)
        assert (TORCHAO in contenders(SMALL[1], CPU, backward=True)) == installed
    assert recipes == ["rowwise_with_gw_hp"]


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if not layer.rank and len(layer.shape) == 3])
def test_torchao_computes_weight_gradients_of_as_many_bits_as_auto_mode(layer: Layer) -> None:
    x = torch.empty(layer.shape[:2], dtype=torch.bfloat16, device="meta", requires_grad=True)
    # Launched one by one, some of these layers run in 16 bits.
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        text = str(fl.explain(layer.ours("fp8", x.device), x, on="H100"))
    bits = {"rowwise": 8, "rowwise_with_gw_hp": 16}[layer.recipe]
    assert f"weight gradients in {bits} bits" in text


def test_a_wrong_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_wrong_one(*given: Any) -> dict[str, nn.Module]:
        found = contenders(*given)
        return found | {FP8: SMALL[0].ours("fp8", CPU)}

    monkeypatch.setattr(torch, "compile", eagerly)
    monkeypatch.setattr(float8, "contenders", with_a_wrong_one)
    with pytest.raises(ValueError, match="fp8 is wrong"):
        float8.measured(SMALL[0], "forward", Clock(), CPU, 0.01, seed=0)


def test_a_wrong_row_is_left_out_of_the_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(layer: Layer, direction: str, *given: Any) -> dict[str, Any]:
        if layer == LAYERS[1]:
            raise ValueError("fp8 is wrong: 3.0 dB")
        compilation = {COMPILED: 2.0, SEPARATE: 3.0}
        return record(title=layer.title, direction=direction, compilation=compilation)["rows"][0]

    monkeypatch.setattr(float8, "chosen_gpu", lambda *given: torch.device("cuda", 0))
    monkeypatch.setattr(float8, "record_path", lambda *given: tmp_path / "float8.json")
    monkeypatch.setattr(float8, "clock_for", lambda device: Clock())
    monkeypatch.setattr(float8, "measured", measured)
    monkeypatch.setattr(float8, "has_torchao", lambda: False)
    monkeypatch.setattr(float8.records, "new_record", lambda *given: record() | {"rows": [], "finished": None})
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert float8.main([]) == 1
    told = capsys.readouterr()
    assert "RED    gated FFN, silu 16384×2048×8192 forward: fp8 is wrong: 3.0 dB" in told.err
    label = "timed  linear 8192×4096×4096 forward (compilation: torch.compile 2.0 s, separate 3.0 s)"
    assert label in told.out
    assert "skip   torchao: it is not installed: pip install torchao" in told.out
    found = json.loads((tmp_path / "float8.json").read_text())
    assert len(found["rows"]) == 2 * (len(LAYERS) - 1)
    assert found["finished"]
    assert float8.main(["--layers", "experts"]) == 0
    assert capsys.readouterr().out.count("timed  gated experts, silu") == 4


def test_what_never_stops_compiling_is_refused() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        float8.counters["stats"]["unique_graphs"] += 1
        return ()

    with pytest.raises(ValueError, match="still compiles after"):
        float8._warm_up(step)


def test_the_layers_are_those_of_models() -> None:
    assert all(size % 16 == 0 for layer in LAYERS for size in layer.shape[:3])
    assert len({(layer.title, layer.shape) for layer in LAYERS}) == len(LAYERS) == 9


def test_what_it_cannot_do_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        float8.main(["--dtype", "fp16"])
    assert "argument --dtype: fp16: expected bf16" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        float8.main(["--layers", "convolution"])
    assert "argument --layers: convolution: expected a part of one of these: FFN, gelu; " in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert float8.main(["--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said == "error: products in 8 bits are timed beside torch, which needs a GPU\n"
