"""What steps in 8 bits are compared with."""

import statistics
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import steps
from benchmarks.step_models import FP8, STEP_MODELS, TORCH, Sizes
from benchmarks.step_truth import Truth, _Linear8, _Rounding
from tests.support import float8_twins
from tests.support.float8_twins import in_8_bits

CPU = torch.device("cpu")
LLAMA = replace(STEP_MODELS["llama-256"], sizes=Sizes(64, 128, 2, 61, batch=2, length=32, layers=1))


@pytest.mark.parametrize(("scale", "green"), [(1.0, True), (1.25, False)])
def test_a_wrong_scale_shows_beside_the_noise(scale: float, green: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = float8_twins.reference.scaled_product
    monkeypatch.setattr(float8_twins.reference, "scaled_product", lambda *given: scale * product(*given))
    with in_8_bits():
        [row] = steps.measured(LLAMA, ("eager",), (TORCH, FP8), torch.bfloat16, CPU, 0, 0.01)
    assert [verdict["status"] for verdict in row["verification"]] == ["green", "green" if green else "red"]
    assert (row["contenders"][FP8]["status"] == "timed") is green


def test_linear_layers_but_the_head_are_rounded_while_the_error_is_found() -> None:
    torch.manual_seed(0)
    plain = LLAMA.build(CPU, torch.float32)
    truth = Truth(plain, LLAMA.inputs(CPU, torch.float32, 0))
    with in_8_bits():
        error = truth.float8_error
    assert 0.02 < error < 0.3
    assert all(parameter.grad is None for parameter in plain.parameters())
    plain(**truth.inputs).loss.backward()
    assert statistics.median(truth.errors()) < 1e-5
    # Auto mode leaves layers as narrow as these in 16 bits.
    narrow = Truth(LLAMA.build(CPU, torch.float32), truth.inputs)
    assert narrow.float8_error < 1e-5


def test_biases_are_not_rounded() -> None:
    layer = nn.Linear(64, 64)
    x = torch.zeros(3, 64, requires_grad=True)
    with in_8_bits(), _Rounding(None):
        assert torch.equal(layer(x), layer.bias.expand(3, 64))


def test_experts_are_rounded_too() -> None:
    torch.manual_seed(0)
    mixtral = replace(STEP_MODELS["mixtral-1024"], sizes=Sizes(64, 128, 2, 61, batch=2, length=32, layers=1))
    plain = mixtral.build(CPU, torch.float32)
    before = plain.config._experts_implementation
    truth = Truth(plain, mixtral.inputs(CPU, torch.float32, 0))
    rounded: list[torch.Size] = []

    def noted(function: Any, *given: Any) -> Any:
        rounded.append(given[1].shape)
        return function(*given)

    with in_8_bits(), mock.patch.object(_Linear8, "apply", partial(noted, _Linear8.apply)):
        assert truth.float8_error > 0.02
    # Up with the gate, and down; neither the router nor the head.
    assert {torch.Size((256, 64)), torch.Size((64, 128))} <= set(rounded)
    assert not {torch.Size((8, 64)), torch.Size((61, 64))} & set(rounded)
    assert plain.config._experts_implementation == before
