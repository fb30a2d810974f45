"""torch.fx.symbolic_trace of every module, as root and inside of another one: one node for each call of ours."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusedlayers as fl
from fusedlayers import functional

X = torch.randn(3, 8)
TARGET = torch.tensor([1, 0, 2])
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Callable[..., Any]]] = {
    "ffn": (lambda: fl.FusedFFN(8, 16), (X,), functional.ffn),
    "gated": (lambda: fl.FusedFFN(8, 16, "silu", gated=True, bias=False), (X,), functional.ffn),
    "residual": (lambda: fl.FusedFFN(8, 16), (X, X), functional.ffn),
    "float64": (lambda: fl.FusedFFN(8, 16, dtype=torch.float64), (X.double(),), functional.ffn),
    "experts": (lambda: fl.FusedMoE(8, 16, num_experts=4, top_k=2), (X,), functional.moe_ffn),
    "wide experts": (lambda: fl.FusedMoE(8, 16, 4, 2, dtype=torch.float64), (X.double(),), functional.moe_ffn),
    "loss": (lambda: fl.LinearCrossEntropyLoss(8, 5, bias=True), (X, TARGET), functional.linear_cross_entropy),
    "maxsim": (fl.MaxSim, (torch.randn(2, 4, 8), torch.randn(3, 5, 8)), functional.maxsim),
    "linear": (lambda: fl.SplitKLinear(8, 16), (X,), torch.nn.functional.linear),
}


def called(graph: fx.GraphModule, function: Callable[..., Any]) -> int:
    return sum(node.target is function for node in graph.graph.nodes)


def gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    module.zero_grad()
    y = module(*inputs)
    if y.requires_grad:
        y.square().sum().backward()
    return {"y": y.detach()} | {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("called_before", [False, True], ids=["new", "called before"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_as_root_is_one_call(name: str, called_before: bool) -> None:
    make, inputs, function = MODULES[name]
    module = make()
    for _ in range(3 * called_before):
        module(*inputs)
    traced = fx.symbolic_trace(module)
    assert called(traced, function) == 1
    # What was not given when it was traced is given now.
    for graph in (traced, copy.deepcopy(traced)):
        torch.testing.assert_close(gradients(graph, inputs), gradients(module, inputs))
    # The parameters are those of the module, not what they were when it was traced.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(traced(*inputs), module(*inputs))


def test_modules_inside_of_another_one() -> None:
    model = nn.Sequential(fl.FusedFFN(8, 16), nn.LayerNorm(8), fl.FusedFFN(8, 16, dropout=0.5).eval())
    traced = fx.symbolic_trace(model)
    assert called(traced, functional.ffn) == 2
    torch.testing.assert_close(traced(X), model(X))


def test_children_that_must_be_called_are() -> None:
    module = fl.FusedFFN(8, 16)
    seen: list[Any] = []
    module.up_proj.register_forward_hook(lambda *given: seen.append(given))
    traced = fx.symbolic_trace(module, concrete_args={"residual": None})
    assert called(traced, functional.ffn) == 0
    torch.testing.assert_close(traced(X), module(X))
    assert len(seen) == 2, "in the graph, and in the module"


def test_functions_of_symbols_are_one_call() -> None:
    a, b, c = torch.randn(2, 5, 3), torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    traced = fx.symbolic_trace(lambda a, b, c: functional.gemm_gemm(operator.neg(a), b, c, activation="relu"))
    assert called(traced, functional.gemm_gemm) == 1
    torch.testing.assert_close(traced(a, b, c), functional.gemm_gemm(-a, b, c, activation="relu"))
