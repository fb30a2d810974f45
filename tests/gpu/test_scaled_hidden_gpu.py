"""Products of 8-bit operands with scales, and their epilogues, on a GPU: exact integers, close to torch, bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.gemm_epilogue import Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.support.operands import DEVICE

E4M3, BFLOAT16, FLOAT16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
NAN = float("nan")
# Tokens, inner axis, hidden units: whole tiles, tails of everything, less than a tile, more steps than stages.
SIZES = [(1024, 512, 384), (1001, 592, 200), (3, 16, 8), (300, 4096, 264)]

pytestmark = [
    pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon"),
    pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"]),
    pytest.mark.parametrize("size", SIZES, ids=str),
]


def quantised(values: Tensor, by_row: bool) -> Scaled:
    largest = values.abs().amax(1) if by_row else values.abs().amax()
    scale = (largest / 448.0).clamp_min(1e-12)
    return Scaled((values / (scale[:, None] if by_row else scale)).to(E4M3), scale)


def meant(operand: Scaled) -> Tensor:
    scale = operand.scale.double()
    return operand.values.double() * (scale[:, None] if scale.dim() else scale)


def run(
    x: Scaled, w: Scaled, bias: Tensor | None, gate: Scaled | None, activation: str, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """H, Z and Zg by name; H is the same where no pre-activation is kept."""
    pipeline = EPILOGUE_PIPELINES["scaled_hidden", gate is not None]
    how = Arithmetic(activation, "half", "ieee"), pipeline, dtype
    more = gate, bias if gate is not None else None
    hidden, z, z_gate = kernels.scaled_hidden(x, w, bias, *more, True, *how)
    alone, *nothing = kernels.scaled_hidden(x, w, bias, *more, False, *how)
    assert nothing == [None, None]
    assert torch.equal(alone, hidden)
    return {"H": hidden, "Z": z, "Zg": z_gate}


def expected(
    x: Tensor, w: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> dict[str, Tensor | None]:
    z, z_gate = (None if weight is None else F.linear(x, weight, bias) for weight in (w, gate))
    return {"H": reference.hidden(z, z_gate, activation=activation), "Z": z, "Zg": z_gate}


def integers(rows: int, columns: int, by_row: bool) -> Scaled:
    """Integers so sparse that bfloat16 counts their products, and scales of powers of two."""
    taken = torch.rand(rows, columns, device=DEVICE) < min(1.0, 8 / columns**0.5)
    values = (torch.randint(-2, 3, (rows, columns), device=DEVICE) * taken).to(E4M3)
    return Scaled(values, torch.randint(-3, 4, (rows,) if by_row else (), device=DEVICE).float().exp2())


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "tensor"])
def test_integers_with_scales_of_powers_of_two_are_exact(size: tuple[int, int, int], gated: bool, by_row: bool) -> None:
    M, K, N = size
    for _ in range(5):
        x, w, gate = (integers(rows, K, by_row) for rows in (M, N, N))
        gate = gate if gated else None
        want = expected(meant(x), meant(w), None, None if gate is None else meant(gate), "identity")
        found = run(x, w, None, gate, "identity", BFLOAT16)
        for name, value in want.items():
            if value is not None and (name != "H" or not gated):
                assert torch.equal(found[name], value.to(BFLOAT16)), name


def drawn(size: tuple[int, int, int]) -> tuple[Scaled, Scaled, Scaled]:
    M, K, N = size
    weights = [quantised(torch.randn(N, K, device=DEVICE) / K**0.5, True) for _ in range(2)]
    return quantised(torch.randn(M, K, device=DEVICE), True), *weights


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_close_to_the_product_of_what_the_values_stand_for(
    size: tuple[int, int, int], gated: bool, activation: str
) -> None:
    """As close as torch's product of the same numbers in bfloat16."""
    x, w, gate = drawn(size)
    bias = torch.randn(size[2], device=DEVICE, dtype=BFLOAT16)
    given = [meant(x), meant(w), bias.double(), meant(gate) if gated else None]
    of_torch = expected(*(None if tensor is None else tensor.to(BFLOAT16) for tensor in given), activation=activation)
    found = run(x, w, bias, gate if gated else None, activation, BFLOAT16)
    assert_all_close(found, of_torch, expected(*given, activation=activation))


def test_sums_keep_the_bits_that_the_tensor_core_keeps(size: tuple[int, int, int], gated: bool) -> None:
    """About 14 bits of the largest sum on the way, where a result has fewer bits of its own: in float16 Z shows it."""
    x, w, gate = drawn(size)
    found = run(x, w, None, gate if gated else None, "identity", FLOAT16)
    for name, weight in {"Z": w, "Zg": gate}.items():
        z = found[name]
        if z is not None:
            truth = meant(x) @ meant(weight).T
            rounded = truth.abs() * torch.finfo(FLOAT16).eps
            lost = ((z.double() - truth).abs() - rounded).clamp_min(0) / (meant(x).abs() @ meant(weight).abs().T)
            assert lost.max() <= 2.0**-11


def gradient(dy: Scaled, w: Scaled, z: Tensor, z_gate: Tensor | None, activation: str) -> dict[str, Tensor | None]:
    """dZ, dZg and H by name; the first two are the same where no hidden is kept."""
    how = Arithmetic(activation, "half", "ieee"), EPILOGUE_PIPELINES["scaled_hidden_gradient", z_gate is not None]
    dz, d_gate, hidden = kernels.scaled_hidden_gradient(dy, w, z, z_gate, True, *how)
    *alone, nothing = kernels.scaled_hidden_gradient(dy, w, z, z_gate, False, *how)
    assert nothing is None
    for one, other in zip(alone, (dz, d_gate), strict=True):
        assert one is other is None or torch.equal(one, other)
    return {"dZ": dz, "dZg": d_gate, "H": hidden}


def expected_gradient(
    dy: Tensor, w: Tensor, z: Tensor, z_gate: Tensor | None, activation: str
) -> dict[str, Tensor | None]:
    """``w`` is that of the layer transposed, ``[N, O]``."""
    leaves = [None if each is None else each.clone().requires_grad_() for each in (z, z_gate)]
    hidden = reference.hidden(*leaves, activation=activation)
    given = [each for each in leaves if each is not None]
    dz, *d_gate = torch.autograd.grad(hidden, given, dy @ w.T)
    return {"dZ": dz, "dZg": d_gate[0] if d_gate else None, "H": hidden.detach()}


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "tensor"])
def test_exact_gradients_of_integers(size: tuple[int, int, int], gated: bool, by_row: bool) -> None:
    M, O, N = size
    for _ in range(5):
        dy, w = integers(M, O, by_row), integers(N, O, by_row)
        z, z_gate = (torch.randint(-1, 2, (M, N), device=DEVICE).to(BFLOAT16) for _ in range(2))
        given = z, z_gate if gated else None
        want = expected_gradient(
            meant(dy), meant(w), *(None if each is None else each.double() for each in given), activation="relu"
        )
        found = gradient(dy, w, *given, "relu")
        for name, value in want.items():
            if value is not None:
                assert torch.equal(found[name], value.to(BFLOAT16)), name


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gradients_as_close_as_those_of_torch(size: tuple[int, int, int], gated: bool, activation: str) -> None:
    M, _, N = size
    dy, w, _ = drawn(size)
    z, z_gate = (torch.randn(M, N, device=DEVICE, dtype=BFLOAT16) for _ in range(2))
    given = z, z_gate if gated else None
    in_float64 = [meant(dy), meant(w), *(None if each is None else each.double() for each in given)]
    of_torch = expected_gradient(meant(dy).to(BFLOAT16), meant(w).to(BFLOAT16), *given, activation)
    assert_all_close(
        gradient(dy, w, *given, activation), of_torch, expected_gradient(*in_float64, activation=activation)
    )


def test_the_same_bits_and_nothing_beside_the_result(size: tuple[int, int, int], gated: bool) -> None:
    M, K, N = size
    wide = torch.full((M + 2, K + 32), NAN, device=DEVICE).to(E4M3)
    values = torch.randn(M, K, device=DEVICE)
    own = quantised(values, True)
    wide[1:-1, 16 : 16 + K] = own.values
    around = torch.full((M + 2,), NAN, device=DEVICE)
    around[1:-1] = own.scale
    x, w = Scaled(wide[1:-1, 16 : 16 + K], around[1:-1]), quantised(torch.randn(N, K, device=DEVICE), True)
    gate = w if gated else None
    first = run(own, w, None, gate, "silu", BFLOAT16)
    for _ in range(10):
        again = run(x, w, None, gate, "silu", BFLOAT16)
        assert all(torch.equal(again[name], value) for name, value in first.items() if value is not None)
