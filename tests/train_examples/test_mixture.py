"""The language model with experts: all kinds of layers start equal and learn alike, and settings are checked."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import fusedlayers as fl
from fusedlayers import FusedMoE
from fusedlayers.replacing.experts import FusedExperts
from tests.support.training_runs import settings, train
from train_examples.language_model import build_model, flops_per_token
from train_examples.mixture import Experts, Mixture
from train_examples.rules import SettingsError

EXPERTS = ("model=experts", "model.d_ff=24", "model.context=32", "model.d_model=32", "model.heads=2", "model.layers=2")
KINDS = ("torch", "fused", "replaced")


@pytest.mark.parametrize("options", [(), ("model.gated=true", "model.activation=silu")], ids=["plain", "gated"])
def test_all_kinds_of_layers_start_equal(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = []
    for kind in KINDS:
        chosen = settings(tmp_path, *EXPERTS, f"layers={kind}", *options)
        torch.manual_seed(3)
        model = build_model(chosen.model, chosen.layers)
        block = model.blocks[0].feed_forward
        assert isinstance(block, FusedMoE if kind == "fused" else Mixture)
        assert isinstance(block.experts, FusedExperts) is (kind == "replaced")
        assert "skipped  " not in capsys.readouterr().out
        states.append(model.state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


def test_all_kinds_of_layers_learn_alike(tmp_path: Path) -> None:
    curves = []
    for kind in KINDS:
        rows = train(tmp_path / kind, *EXPERTS, f"layers={kind}", "run.steps=20", "run.batch_size=8")
        curves.append(torch.tensor([row["train_loss"] for row in rows]))
    assert curves[0][-1] < curves[0][0]
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], rtol=1e-4, atol=0)


def test_the_experts_of_the_example_are_found_and_proven() -> None:
    torch.manual_seed(0)
    module = Experts(16, 24, 5, "gelu", gated=True)
    twin = copy.deepcopy(module)
    [entry] = fl.replace(twin).replaced
    assert entry.reason.startswith("gate_up_proj, down_proj: gated gelu, 5 experts, 16 -> 24 -> 16")
    x, index = torch.randn(9, 16), torch.randint(5, (9, 2))
    weights = torch.rand(9, 2)
    torch.testing.assert_close(twin(x, index, weights), module(x, index, weights))


def test_a_token_has_the_arithmetic_of_its_experts(tmp_path: Path) -> None:
    mixture = settings(tmp_path, *EXPERTS).model
    dense = settings(tmp_path, *EXPERTS, "model.experts=0", "model.d_ff=48").model
    router = 6 * mixture.layers * mixture.d_model * mixture.experts
    assert flops_per_token(mixture) == flops_per_token(dense) + router


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.experts_per_token=9", "model.experts_per_token is 9; expected at most model.experts=8"),
        ("model.experts=-1", "model.experts is -1; expected 0 or more"),
        ("model.bias=true", "expected model.bias=false and model.dropout=0.0 with experts"),
        ("model.dropout=0.1", "expected model.bias=false and model.dropout=0.0 with experts"),
        ("parallel=tp", "parallel.kind is tp; expected none, ddp or fsdp with model.experts above 0"),
    ],
)
def test_settings_that_cannot_work(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(tmp_path, *EXPERTS, override)
