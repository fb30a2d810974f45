"""`replace` with a precision where linears carry peft's adapters: what runs in 8 bits, merged adapters, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.functional import float8
from fusedlayers.functional.dispatch import decisions
from tests.support.float8_twins import in_8_bits

peft = pytest.importorskip("peft", exc_type=ImportError)

BFLOAT16 = torch.bfloat16
WIDTH = 64


class Block(nn.Module):
    """A linear layer and a gated FFN."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.query(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.down = nn.Linear(128, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def made(targets: tuple[str, ...] = ("query", "gate", "up", "down"), **options: Any) -> nn.Module:
    given = {"r": 8, "lora_alpha": 6, "init_lora_weights": False, "target_modules": list(targets)} | options
    return peft.inject_adapter_in_model(peft.LoraConfig(**given), nn.Sequential(Block(), Block())).to(BFLOAT16)


def drawn() -> Tensor:
    return torch.randn(2, 20, WIDTH).to(BFLOAT16).requires_grad_()


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"y": y.detach(), **gradients}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_runs_in_8_bits_and_back(dropout: float) -> None:
    model, x = made(lora_dropout=dropout), drawn()
    with torch.no_grad():
        expected = model.eval()(x)
    with in_8_bits():
        report = fl.replace(model.train(), precision="fp8")
        became = {entry.path: entry for entry in report.replaced}
        # peft calls the linear that it wraps.
        assert set(became) == {f"{place}.{name}" for place in (0, 1) for name in ("mlp", "query.base_layer")}
        assert all(entry.reason.endswith("; fp8") for entry in became.values())
        assert {entry.plan for entry in became.values()} == {"float8", None}
        with decisions() as taken:
            found = outcome(model, x)
        assert taken == {"lora_ffn float8": 2, "linear float8": 2}
        assert {name for name in found if name != "y"} == {
            name for name, _ in model.named_parameters() if "lora_" in name
        }
        if not dropout:
            with torch.no_grad():
                assert torch.equal(model(x), found["y"])
            text = str(fl.explain(model, x))
            assert text.count("in the float8 kernels") == 4
            block: Any = model
            assert fl.verify(block[0].mlp, x.detach()).ok
        fl.restore(model)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), expected)


def test_adapters_of_a_rank_as_wide_as_a_layer_stay_in_16_bits() -> None:
    model, x = made(r=WIDTH), drawn()
    with in_8_bits():
        report = fl.replace(model, precision="fp8")
        with decisions() as taken:
            model(x)
    assert taken == {"lora_ffn float8": 2, "linear float8": 2}
    left = {entry.path: entry.reason for entry in report.skipped}
    assert left["0.query.lora_A.default"] == "not in 8 bits: it is part of an adapter"


@pytest.mark.parametrize("wrapped", ["target_modules", "modules_to_save"])
def test_a_head_that_peft_wraps_stays_in_16_bits(wrapped: str) -> None:
    model = nn.ModuleDict({"query": nn.Linear(WIDTH, WIDTH), "lm_head": nn.Linear(WIDTH, 96)})
    options: Any = {"target_modules": ["query"], "modules_to_save": []}
    options[wrapped] = [*options[wrapped], "lm_head"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, **options)).to(BFLOAT16)
    with in_8_bits():
        report = fl.replace(adapted, precision="fp8")
    assert [entry.path.removeprefix("base_model.model.") for entry in report.replaced] == ["query.base_layer"]


def test_float32_adapters_of_weights_in_16_bits_run_in_8_bits_under_autocast() -> None:
    model, x = made(("up", "down")), drawn()
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.data = each.data.float()
    with in_8_bits() as quantised:
        fl.replace(model, precision="fp8")
        for _ in range(2):
            quantised.clear()
            with torch.autocast("cpu", BFLOAT16), decisions() as taken:
                y = model(x)
            y.float().square().sum().backward()
            torch.optim.SGD([each for name, each in model.named_parameters() if "lora_" in name], lr=0.1).step()
            assert taken["lora_ffn float8"] == 2
            # The weights of two FFNs, of which dx needs the transposes; the linear layers' are quantised, too.
            assert quantised["transposed"] == 6
    assert all(each.grad is not None for name, each in model.named_parameters() if "lora_" in name)


def test_merged_adapters_run_as_the_block_does() -> None:
    model, x = made(("gate", "up", "down")), drawn().detach()
    with in_8_bits():
        fl.replace(model, precision="fp8")
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        for each in layers:
            each.merge()
        with decisions() as taken, torch.no_grad():
            merged = model(x)
        assert taken["ffn float8"] == 2
        for each in layers:
            each.unmerge()
        with decisions() as taken, torch.no_grad():
            unmerged = model(x)
        assert taken["lora_ffn float8"] == 2
        assert fl.closeness.noise.sqnr(unmerged, merged.double()) > 18


def test_adapters_that_are_merged_and_made_anew() -> None:
    """The weights change past their version counters: no quantised copy outlives a step."""
    model, x = made(("gate", "up", "down")), drawn()
    with in_8_bits():
        fl.replace(model, precision="fp8")

        def step() -> None:
            outcome(model, x)
            torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3).step()

        step()
        for each in [module for module in model.modules() if hasattr(module, "lora_A")]:
            each.merge()
            each.merged_adapters.clear()
            each.reset_lora_parameters("default", init_lora_weights=True)
        step()
        kept = model(x)
        float8.forget_weights()
        assert torch.equal(model(x), kept)


def test_compiled() -> None:
    with in_8_bits():
        model, x = made(("gate", "up", "down")), drawn()
        fl.replace(model, precision="fp8")
        expected = outcome(model, x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = outcome(compiled, x)
        assert torch.equal(found["y"], expected["y"])
        assert all(torch.equal(found[f"_orig_mod.{name}"], each) for name, each in expected.items() if name != "y")
