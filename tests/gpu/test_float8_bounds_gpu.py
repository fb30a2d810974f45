"""The hidden and its gradients in 8 bits, from the kernels that compute them: the model's values, and hard operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import reference
from fusedlayers.closeness.noise import OF_LAYER, OF_WEIGHT_GRADIENT, sqnr
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.dropout import NO_DROPOUT, Dropout
from fusedlayers.kernels.float8 import quantise_rows, quantise_transposed
from fusedlayers.kernels.hopper import Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.gpu.test_float8_gpu import BFLOAT16, GATED, SIZES, ffn, gradients, operands, pytestmark, wherever_it_can
from tests.support import float8_twins as twins
from tests.support.operands import DEVICE

__all__ = ["pytestmark", "wherever_it_can"]


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    """The same codes, but where factors that are no powers of two decide otherwise between two neighbours."""
    a, b = found.float(), expected.float()
    assert ((a - b).abs() <= b.abs().clamp(min=2.0**-6) / 7).all()
    assert (a != b).float().mean() < 0.001
    assert a.abs().max() > 1, "bounds are not so loose"


@GATED
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_values_of_the_model(size: tuple[int, int, int], gated: bool, dropout_p: float) -> None:
    """Of 0, 1 and -1, whose sums the tensor core does not round."""
    shapes = {name: each.shape for name, each in operands(size, gated, not gated).items()} | {"dy": size[:2]}
    given = {
        name: torch.randint(-1, 2, shape, device=DEVICE).to(BFLOAT16) for name, shape in shapes.items()
    }  # fmt: skip
    dropout = Dropout(torch.tensor([7], device=DEVICE), dropout_p) if dropout_p else NO_DROPOUT
    how = Arithmetic("relu", "coarse", "ieee")
    x_norms, dy_norms = (torch.empty(size[0], device=DEVICE) for _ in range(2))
    x, dy = (quantise_rows(given[name], norms=norms) for name, norms in (("x", x_norms), ("dy", dy_norms)))

    def weight(name: str) -> Any:
        norms = torch.empty(size[2], device=DEVICE)
        return quantise_rows(given[f"w_{name}"], norms=norms), norms

    up, gate, bias = weight("up"), weight("gate") if gated else None, given.get("b_up")
    units = twins.unit_table(up, gate, bias)
    rows = twins.row_table(x, x_norms, gated, not gated, 1 / (1 - dropout_p))
    words = units.view(torch.int32)
    left, right = Scaled(x.values, rows[0].view(torch.int32)), Scaled(up[0].values, words[0])
    other = None if gate is None else Scaled(gate[0].values, words[1])
    arguments = (left, right, bias, other, None, True, how)
    found = kernels.scaled_hidden(*arguments, EPILOGUE_PIPELINES["scaled_hidden", gated], BFLOAT16, dropout)
    expected = twins.scaled_hidden(*arguments, None, BFLOAT16, dropout)
    assert_rounded_alike(found[0], expected[0])

    norms = torch.empty(size[2], device=DEVICE)
    down = quantise_transposed(given["w_down"], norms=norms)
    scales = twins.gradient_units(down, norms, units, gated)[0]
    table = twins.gradient_rows(dy, dy_norms, x_norms if gated else None, 1.5)
    of_dy = Scaled(dy.values, table[0])
    z, z_gate = found[1:]
    more = {"units": words[4], "hidden_rows": rows[2]}
    pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
    arguments = of_dy, Scaled(down.values, scales), z, z_gate, True, how
    both, nothing, hidden = kernels.scaled_hidden_gradient(*arguments, pipeline, dropout, **more)
    expected = twins.scaled_hidden_gradient(*arguments, None, dropout, **more)
    assert nothing is None
    assert_rounded_alike(both, expected[0])
    assert_rounded_alike(hidden, expected[2])
    again = kernels.scaled_hidden_gradient(*arguments, pipeline, dropout, **more)
    assert torch.equal(again[0].view(torch.int8), both.view(torch.int8))
    assert torch.equal(again[2].view(torch.int8), hidden.view(torch.int8))


@pytest.mark.parametrize(("gated", "bias"), [(False, False), (False, True), (True, False)], ids=["", "bias", "gated"])
def test_units_of_very_different_size(gated: bool, bias: bool) -> None:
    """One unit with weights thirty times those of the others, one without any, and tokens of all sizes."""
    given = operands(SIZES[1], gated, bias)
    with torch.no_grad():
        for name in ("w_up", "w_gate"):
            if name in given:
                given[name][5] *= 30
                given[name][9] = 0
        given["w_down"][:, 11] = 0
        given["x"] *= torch.randn(len(given["x"]), 1, device=DEVICE).exp()
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    dy = torch.randn(SIZES[1][:2], device=DEVICE, dtype=BFLOAT16)
    y, truth = ffn(given, activation="silu"), reference.ffn(**exact, activation="silu")
    assert sqnr(y, truth) >= OF_LAYER
    found, expected = gradients(y, given, dy), gradients(truth, exact, dy.double())
    for name, each in found.items():
        # Units that outweigh all others bring their own noise into dx, in 8 bits of any kind.
        assert sqnr(each, expected[name]) >= (12 if name == "x" else OF_WEIGHT_GRADIENT), name


@GATED
def test_rows_of_any_size_stay_finite(gated: bool) -> None:
    given = operands(SIZES[0], gated, bias=False)
    with torch.no_grad():
        factors = torch.tensor([1e-30, 1e-12, 1.0, 1e12, 1e15], device=DEVICE).repeat(205)[:1024, None]
        given["x"] = (given["x"] * factors).to(BFLOAT16)
        y = ffn(given, activation="relu")
        truth = reference.ffn(**{name: each.double() for name, each in given.items()}, activation="relu")
    for row in range(1, 5):
        assert sqnr(y[row], truth[row]) >= OF_LAYER - 3, row
    assert y.isfinite().all()
