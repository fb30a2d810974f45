"""Dropout in compiled graphs: whatever these compute again to save memory, both passes have one mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor

from fusedlayers import functional
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.operands import DEVICE, needs_kernels

# What torch says of itself when it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]
BUDGETS = [0.5, 0.0]
OF_REGIONS = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
WEIGHTS = {"w_up": (64, 16), "w_down": (16, 64)}


def drawn(*shape: int) -> Tensor:
    return (torch.randn(shape, device=DEVICE) / 4).requires_grad_()


def ffn(x: Tensor, **weights: Tensor) -> Tensor:
    """Half of the hidden is dropped; ``sin`` is cheap to compute again."""
    return functional.ffn(x.sin(), **weights, dropout_p=0.5)


def lora_ffn(x: Tensor, **weights: Tensor) -> Tensor:
    """Half of what the adapter takes is dropped."""
    up_a, up_b = x.new_ones(4, 16), x.new_ones(64, 4)
    return functional.lora_ffn(x.sin(), **weights, up_a=up_a, up_b=up_b, adapter_dropout_p=0.5)


def compiled(call: Callable[..., Tensor]) -> Any:
    return torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True)


def assert_one_mask(call: Callable[..., Tensor]) -> None:
    """Without biases y is linear in w_down: ``<dy, y> = <dw_down, w_down>`` if the mask of both passes is one."""
    weights = {name: drawn(*shape) for name, shape in WEIGHTS.items()}
    weights["w_up"].requires_grad_(False)
    y = call(drawn(40, 16), **weights)
    dy = torch.randn_like(y)
    (dw_down,) = torch.autograd.grad(y, [weights["w_down"]], dy)
    ours, theirs = dw_down * weights["w_down"].detach(), dy * y.detach()
    # Terms of both signs: what their rounding may add up to is a share of their sizes, not of their sum.
    assert (ours.sum() - theirs.sum()).abs() <= 1e-5 * theirs.abs().sum()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("call", "backend"),
    [(ffn, "torch"), (lora_ffn, "torch"), pytest.param(ffn, "triton", marks=needs_kernels)],
    ids=["ffn", "lora_ffn", "kernels"],
)
def test_a_memory_budget_keeps_the_mask(
    call: Callable[..., Tensor], backend: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    with functorch.patch(activation_memory_budget=budget):
        assert_one_mask(compiled(call))


@pytest.mark.skipif(OF_REGIONS is None, reason="this release of torch has no budgets of regions")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_of_a_region_keeps_the_mask(budget: float) -> None:
    def call(x: Tensor, **weights: Tensor) -> Tensor:
        assert OF_REGIONS is not None
        with OF_REGIONS(budget):
            return ffn(x, **weights)

    assert_one_mask(compiled(call))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_call_has_a_mask_of_its_own(budget: float) -> None:
    x, weights = drawn(40, 16), {name: drawn(*shape) for name, shape in WEIGHTS.items()}
    with functorch.patch(activation_memory_budget=budget):
        call = compiled(ffn)
        torch.manual_seed(3)
        first, second = (call(x, **weights) for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        second.sum().backward()
        assert torch.equal(call(x, **weights), first), "a backward pass draws nothing"
