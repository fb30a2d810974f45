"""Tables of scales that bound results in 8 bits: the numbers of the model, whose kernels are tested on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedlayers.closeness.noise import sqnr
from fusedlayers.kernels import bounds
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.hopper import Scaled
from fusedlayers.planning.float8 import _UNBOUNDED
from fusedlayers.reference import float8 as reference
from tests.support import float8_twins as twins
from tests.support.operands import DEVICE, needs_kernels

SIZES = [1, 300, 1024]


def powers(size: int) -> Tensor:
    return torch.randint(-5, 6, (size,), device=DEVICE).float().exp2()


def operand(size: int) -> tuple[Scaled, Tensor]:
    """Of ``size`` rows: 8-bit values, which tables do not read, with scales; and norms, one of them 0."""
    norms = torch.rand(size, device=DEVICE)
    norms[0] = 0
    return Scaled(torch.zeros(size, 16, device=DEVICE), powers(size)), norms


def bits(table: Tensor) -> Tensor:
    return table.view(torch.int32)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(40, 24), (1100, 70)], ids=str)
def test_channels(size: tuple[int, int], dtype: torch.dtype) -> None:
    up, gate = (torch.randn(size, device=DEVICE).to(dtype) for _ in range(2))
    up[:, 0] = gate[:, 0] = 0
    up[0, 1] = math.nan
    for w_up in (up, up.T.contiguous().T):
        numbers, inverses = bounds.channel_numbers(w_up, gate)
        norms = torch.cat((up, gate)).float().norm(dim=0)[2:]
        assert (numbers[2:].log2() == norms.log2().floor()).all()
        assert (numbers[0], numbers[1]) == (2.0**-40, 2.0**40)
        assert torch.equal(inverses, 1 / numbers)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("gated", "biased"), [(False, False), (False, True), (True, False)], ids=["", "bias", "gated"])
def test_units(size: int, gated: bool, biased: bool) -> None:
    up, other = operand(size), operand(size) if gated else None
    bias = torch.randn(size, device=DEVICE).half() if biased else None
    found, expected = bounds.unit_table(up, other, bias), twins.unit_table(up, other, bias)
    rows = range(6) if gated else (0, 2, 4, 5)
    for row in rows:
        assert torch.equal(bits(found)[row], bits(expected)[row])
    norms = up[1] if bias is None else up[1] + bias.abs()
    assert (found[2] >= norms).all(), "a bound is not rounded down"
    assert (found[2] <= norms.clamp(min=2.0**-40) * (1 + 2.0**-7)).all()
    down, norms = operand(size)
    found, expected = (
        each.gradient_units(down, norms, expected, gated) for each in (bounds, twins)
    )  # fmt: skip
    assert torch.allclose(found, expected, rtol=2e-7, atol=0)


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("gated", "biased"), [(False, False), (False, True), (True, False)], ids=["", "bias", "gated"])
def test_rows(size: int, gated: bool, biased: bool) -> None:
    x, norms = operand(size)
    norms *= 1000
    found, expected = (each.row_table(x, norms, gated, biased, 1 / 0.9) for each in (bounds, twins))
    assert torch.equal(bits(found), bits(expected))
    bound = (norms + biased) * (norms if gated else 1) / 0.9
    assert (found[1] * 448 >= bound).all()
    assert (found[1] * 224 <= bound.clamp(min=2.0**-92)).all()
    found, expected = (each.gradient_rows(x, norms, norms if gated else None, 1.13) for each in (bounds, twins))
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_bounds_that_no_float_holds() -> None:
    x = Scaled(torch.zeros(3, 16, device=DEVICE), torch.ones(3, device=DEVICE))
    norms = torch.tensor([1e30, math.inf, math.nan], device=DEVICE)
    scales = bounds.row_table(x, norms, True, False, 1.0)[1]
    # 448 of these reach beyond float32. Rows that are not finite are NaN already, whatever they are divided by.
    assert scales[0] == 2.0**120


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - set(_UNBOUNDED)))
def test_bounded_activations_are_bounded(name: str) -> None:
    """By the absolute value of what they are of, and their slopes by ``MOST_SLOPE``."""
    z = torch.linspace(-30, 30, 200_001, dtype=torch.float64).requires_grad_()
    value = ACTIVATIONS[name].torch(z)
    [slope] = torch.autograd.grad(value.sum(), z)
    assert (value.abs() <= z.abs() * (1 + 1e-12)).all()
    assert (slope.abs() <= bounds.MOST_SLOPE).all()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("columns", "least"), [(2048, 31), (4096, 30), (8192, 28)])
def test_noise_of_a_hidden_that_is_bounded(columns: int, least: float, gated: bool) -> None:
    """Beside that of one that is quantised by the maxima of rows; the factors of its units do not matter."""
    x = torch.randn(64, columns).bfloat16()
    weights = [(torch.randn(256, columns) * columns**-0.5).bfloat16() for _ in range(1 + gated)]
    quantised, norms = [], []
    for each in (x, *weights):
        norms.append(torch.empty(len(each)))
        quantised.append(twins.quantise_rows(each, norms=norms[-1]))
    of_x, up, *gate = quantised
    hidden, _, _ = reference.scaled_hidden(of_x, up, None, gate[0] if gate else None, activation="silu")
    table = twins.row_table(of_x, norms[0], gated, False, 1.0)
    factors = torch.stack([reference.unit_norms(each) for each in weights]).prod(0)
    values = twins.rounded(hidden, table[2], 1 / factors).float()
    by_maxima = sqnr(reference.dequantised(reference.quantised_rows(hidden)), hidden)
    bounded = sqnr(values * table[1][:, None] * factors, hidden)
    assert bounded >= least
    assert bounded >= by_maxima - (0.5 if not gated else 4)
