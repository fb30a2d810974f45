"""``explain`` of the functions that give the gradients of one layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import explaining, functional
from fusedlayers.functional import dispatch
from fusedlayers.planning import Device

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is said to lie there, and kernels to be wanted."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    for module in (dispatch, explaining):
        monkeypatch.setattr(module, "describe", lambda device: H200)


def meta(*shape: int, gradient: bool = False) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=gradient)


def explained(function: Callable[..., object], *inputs: Tensor, **options: object) -> tuple[str, dict[str, str]]:
    _, title, *rest = fl.explain(function, *inputs, **options, details=True).splitlines()
    return title, {line[2:].split("  ")[0]: line[2:].split("  ", 1)[1].strip() for line in rest}


@pytest.mark.usefixtures("on_h200")
def test_a_weight_gradient() -> None:
    title, found = explained(functional.weight_gradient, meta(4, 16384, 1024), meta(4, 16384, 256))
    assert title == "weight_gradient: dW = dyᵀ x, db = Σ dy"
    assert found == {
        "problem": "M=65536 (rows) O=1024 K=256, bfloat16",
        "device": "NVIDIA H200 sm_90",
        "path": "fused: one kernel reads dy once, for both gradients",
        "tiles": "sm90: 128 × 256 of dW, 64 rows in each of 4 stages, consumers 2",
        "splits": "16 row ranges",
        "FLOPs": f"{2 * 65536 * 1024 * 256:,}",
        "bytes moved": f"at least {2 * (65536 * 1280 + 1024 * 257):,}",
        "saved bytes": "0 (no gradient is wanted)",
        "workspace": f"{16 * 4 * 1024 * 257:,} bytes of temporary memory",
        "floor": "at least 43.5 µs at the device's measured peak rates",
        "not torch": "the fused path comes first",
    }


@pytest.mark.usefixtures("on_h200")
def test_copies_and_gradients_of_a_weight_gradient() -> None:
    strided = meta(30, 4, 16).transpose(0, 1)
    title, found = explained(functional.weight_gradient, strided, meta(4, 30, 8, gradient=True), bias=False)
    assert title == "weight_gradient: dW = dyᵀ x"
    assert found["copies"] == "dy of shape [4, 30, 16] and strides [16, 64, 1] has no uniform rows: one contiguous copy"
    assert found["saved bytes"] == f"{2 * 120 * 24:,} for the backward pass"


@pytest.mark.usefixtures("on_h200")
def test_a_hidden_gradient() -> None:
    tensors = meta(8192, 1024), meta(1024, 4096), meta(8192, 4096)
    title, found = explained(functional.hidden_gradient, *tensors, activation="swish")
    assert title == "hidden_gradient: dH ⊙ act'(z), dH = dy W_down, act = silu: z σ(z)"
    assert found["problem"] == "M=8192 (rows) N=4096 (d_ff) O=1024, bfloat16"
    assert found["path"] == "fused: one kernel writes dZ, and sums it up on the way"
    tiles = "sm90: 128 × 128 of the product, 64 inner, consumers 2 in turn, stages 5"
    assert found["tiles"] == f"{tiles}, each program in one column of them"
    assert found["workspace"] == f"{4 * 8 * 4096:,} bytes of temporary memory"
    title, found = explained(functional.hidden_gradient, *tensors, meta(8192, 4096), activation=None, bias=False)
    assert title.startswith("hidden_gradient: dH ⊙ act(z_gate), dH ⊙ z ⊙ act'(z_gate), dH = dy W_down, act = identity")
    assert found["path"] == "fused: one kernel writes dZ"
    assert found["workspace"] == "0 bytes of temporary memory"


def test_torch_says_why() -> None:
    for function, tensors, options in (
        (functional.weight_gradient, (meta(4, 8), meta(4, 8)), {}),
        (functional.hidden_gradient, (meta(4, 8), meta(8, 3), meta(4, 3)), {"activation": "relu"}),
    ):
        _, found = explained(function, *tensors, **options)
        assert found["path"] == "torch: no other path is both possible and faster"
        assert found["not fused"] == "the kernels need a CUDA or ROCm GPU, and the tensors are on device type meta"
