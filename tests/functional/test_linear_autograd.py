"""The linear layer under autograd: frozen operands, what is kept, autocast, second derivatives, torch.func, purity."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.functional import dispatch, operation
from fusedlayers.functional.recalling import Recalled
from tests.functional.test_linear import KERNELS_AND_TORCH, inputs, upstream
from tests.support.operands import INTEGERS, assert_equal, in_float64, leaves, on_path, results, saved

NAMES = ("x", "weight", "bias")
SUBSETS = [frozen for count in range(4) for frozen in itertools.combinations(NAMES, count)]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("frozen", SUBSETS, ids=lambda frozen: "-".join(frozen) or "none")
def test_frozen_operands(
    frozen: tuple[str, ...], activation: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right gradients for the others, no kernel for what nobody asked for, and nothing kept that no gradient needs."""
    tensors = inputs(9, 7, 40, draw=INTEGERS[torch.float32])
    dy = upstream(tensors, INTEGERS[torch.float32])
    wanted = leaves(tensors, frozen)
    products: list[str] = []
    for module, name in (("split_k", "product"), ("weight_gradient", "weight_gradient")):
        target = f"fusedlayers.kernels.{module}.{name}"
        run = getattr(__import__(f"fusedlayers.kernels.{module}", fromlist=[name]), name)
        monkeypatch.setattr(target, lambda *a, name=name, run=run, **k: products.append(name) or run(*a, **k))

    found: list[Tensor] = []
    with on_path(path):
        kept = saved(lambda: found.append(functional.linear(**wanted, activation=activation)))
        [y] = found
        forward = len(products)
        if len(frozen) < 3:
            y.backward(dy)
    assert y.requires_grad == (len(frozen) < 3)
    if path == "kernels":
        asked = ["product"] * ("x" not in frozen) + ["weight_gradient"] * ("weight" not in frozen)
        assert products[forward:] == asked
        shapes = [(9, 40)] * ("weight" not in frozen) + [(7, 40)] * ("x" not in frozen)
        shapes += [(9, 7)] * (activation is not None and len(frozen) < 3)
        assert sorted(tuple(tensor.shape) for tensor in kept) == sorted(shapes)
    truth = results(reference.linear, in_float64(tensors), dy.double(), activation=activation)
    for name, tensor in wanted.items():
        expected = None if name in frozen else truth[f"d{name}"]
        assert_equal({name: None if tensor.grad is None else tensor.grad.double()}, {name: expected})


@pytest.mark.parametrize("bias", [False, True])
def test_torch_products_with_the_data_gradient_first(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph of both passes records them: the same gradients, second ones too, in another order."""
    tensors = inputs((3, 5), 7, 40, bias=bias)
    dy, planned, order = upstream(tensors), planning.plan, []

    def plan(problem: planning.LinearProblem, device: planning.Device, wish: str) -> planning.LinearPlan:
        return replace(planned(problem, device, "torch"), data_gradient_first=True)

    def gradients(call: Callable[..., Tensor]) -> dict[str, Tensor | None]:
        given = leaves(tensors)
        found = results(call, given, dy)
        x, weight, _ = given.values()
        y = call(**given)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (found["second"],) = torch.autograd.grad(dx.sum(), weight)
        return found

    for name in ("linear", "weight_gradient"):
        run = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *a, name=name, run=run, **k: order.append(name) or run(*a, **k))
    expected = gradients(torch.nn.functional.linear)
    monkeypatch.setattr(dispatch, "_cached_plan", plan)
    monkeypatch.setattr(operation, "CALLS", Recalled())
    assert_equal(gradients(functional.linear), expected)
    # A product forward, and backward another one before the weights'.
    assert order[:3] == ["linear", "linear", "weight_gradient"]
