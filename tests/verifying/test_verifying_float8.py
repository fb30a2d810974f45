"""`verify` of layers in 8 bits: by the ratio of signal to noise, which a fault of a scale does not pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers.closeness import red
from fusedlayers.closeness.noise import judged_by_noise, sqnr
from tests.support import float8_twins
from tests.support.float8_twins import in_8_bits

BFLOAT16 = torch.bfloat16


def blocks() -> list[Any]:
    return [
        fl.FusedFFN(128, 256, "silu", gated=True, dtype=BFLOAT16, precision="fp8"),
        fl.SplitKLinear(128, 256, dtype=BFLOAT16, precision="fp8"),
        fl.FusedMoE(128, 64, 4, 2, dtype=BFLOAT16, precision="fp8"),
    ]


@pytest.mark.parametrize("place", range(3))
def test_layers_in_8_bits_are_right(place: int) -> None:
    with in_8_bits():
        found = fl.verify(blocks()[place], torch.randn(100, 128).to(BFLOAT16))
    assert found.ok, found
    assert "judged by an SQNR of 18 dB" in str(found)
    assert "ran in 8 bits" not in str(fl.verify(blocks()[place], torch.randn(100, 128).to(BFLOAT16)))


@pytest.mark.parametrize("factor", [0.0, 0.95, 1.05, 2.0])
def test_a_scale_that_is_wrong_is_red(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = float8_twins.reference.scaled_product
    monkeypatch.setattr(float8_twins.reference, "scaled_product", lambda *given: factor * right(*given))
    for block in blocks():
        with in_8_bits():
            assert not fl.verify(block, torch.randn(100, 128).to(BFLOAT16)).ok


def test_noise() -> None:
    truth = torch.randn(64, 64, dtype=torch.float64)
    assert sqnr(truth, truth) == float("inf")
    assert abs(sqnr(truth + 0.1 * truth.roll(1), truth) - 20) < 0.5
    assert sqnr(truth, 0 * truth) == float("-inf")
    verdict = red("y", "")
    assert judged_by_noise(verdict, truth, truth, 18).ok
    assert not judged_by_noise(verdict, 1.05 * truth, truth, 18).ok
    assert not judged_by_noise(verdict, truth + 0.2 * truth.roll(1), truth, 18).ok
    wrong = truth.clone()
    wrong[0, 0] = float("nan")
    assert not judged_by_noise(verdict, wrong, truth, 18).ok
