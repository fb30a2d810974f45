"""`SplitKLinear` is an `nn.Linear`: arguments, initial values, state, copies, hooks, parametrization, conversions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fusedlayers as fl
from fusedlayers import SplitKLinear
from fusedlayers.modules import why_not_plain
from tests.support.operands import assert_equal, needs_kernels, on_path


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_drawn_and_named_as_those_of_linear(bias: bool) -> None:
    torch.manual_seed(3)
    ours = SplitKLinear(6, 4, bias=bias, split_k=3)
    torch.manual_seed(3)
    theirs = nn.Linear(6, 4, bias=bias)
    assert isinstance(ours, nn.Linear)
    assert_equal(parameters(ours), parameters(theirs))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.manual_seed(4)
    ours.reset_parameters()
    torch.manual_seed(4)
    theirs.reset_parameters()
    assert_equal(parameters(ours), parameters(theirs))


def test_arguments_up_to_dtype_are_those_of_linear() -> None:
    layer = SplitKLinear(6, 4, False, "meta", torch.float16, split_k=2, reduction="atomic")
    assert (layer.bias, layer.weight.device.type, layer.weight.dtype) == (None, "meta", torch.float16)
    assert layer.extra_repr() == "in_features=6, out_features=4, bias=False, split_k=2, reduction='atomic'"
    assert (SplitKLinear(6, 4).split_k, SplitKLinear(6, 4).reduction) == ("auto", "workspace")
    assert layer(torch.empty(3, 6, device="meta", dtype=torch.float16)).shape == (3, 4)
    filled = layer.to_empty(device="cpu")
    assert filled.weight.device.type == "cpu"


@pytest.mark.parametrize("path", [pytest.param("kernels", marks=needs_kernels), "torch"])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)], ids=str)
def test_forward_and_backward(shape: tuple[int, ...], path: str) -> None:
    ours, x = SplitKLinear(6, 4), torch.randn(shape, requires_grad=True)
    theirs = nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    dy = torch.randn(*shape[:-1], 4)
    with on_path(path):
        y = ours(x)
        found = torch.autograd.grad(y, [x, *ours.parameters()], dy)
    expected = theirs(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [x, *theirs.parameters()], dy))


def test_copies_and_conversions() -> None:
    layer = SplitKLinear(6, 4, split_k=5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is SplitKLinear
        assert (other.split_k, other.reduction) == (5, "workspace")
        assert_equal(parameters(other), parameters(layer))
    assert layer.half().weight.dtype == torch.float16
    assert layer(torch.ones(2, 6).half()).dtype == torch.float16
    assert layer.double()(torch.ones(2, 6).double()).dtype == torch.float64


def test_hooks_parametrization_and_functional_call() -> None:
    layer, x = SplitKLinear(6, 4), torch.randn(3, 6)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    plain = layer(x).detach()
    assert seen == [1]
    doubled = {name: 2 * tensor for name, tensor in layer.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(layer, doubled, (x,)), 2 * plain)
    parametrizations.weight_norm(layer)
    torch.testing.assert_close(layer(x), plain)


def test_other_modules_call_it() -> None:
    assert "not exactly nn.Linear" in str(why_not_plain(SplitKLinear(6, 4)))


def test_explain_takes_the_module() -> None:
    layer = SplitKLinear(6, 4)
    text = fl.explain(layer, torch.ones(2, 6), details=True)
    assert "\nlinear: x Wᵀ + b\n" in text
    for row in ("M=2 (rows) N=4 K=6, float32, forward and backward", "weight gradient", "not fused"):
        assert row in text


@needs_kernels
def test_explain_shows_the_three_choices() -> None:
    layer, x = SplitKLinear(900, 40, split_k=3), torch.ones(200, 900, requires_grad=True)
    with on_path("kernels"):
        text = fl.explain(layer, x, details=True)
    rows = {line[2:].split("  ")[0]: line for line in text.splitlines()[1:]}
    assert "3 ranges of K = 900, added in a fixed order" in rows["forward"]
    assert "2 ranges of N = 40, added in a fixed order" in rows["data gradient"]
    assert "3 ranges of the 200 rows" in rows["weight gradient"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"split_k": 0}, ValueError, "split_k must be .* got 0"),
        ({"split_k": "many"}, TypeError, "split_k must be .* got 'many'"),
        ({"reduction": "tree"}, ValueError, "reduction must be one of workspace, atomic, got 'tree'"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SplitKLinear(6, 4, **options)
