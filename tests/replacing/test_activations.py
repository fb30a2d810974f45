"""Which activations `replace` knows: torch's own, by name, and others by their source."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.replacing import FFNRule, torch_module_activation
from tests.support.ffn_blocks import GatedBlock
from tests.support.recognised_blocks import GLU, K, TanhGELU, Torchtune


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.SiLU(), "silu"),
        (nn.Tanh(), "tanh"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Identity(), "identity"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.LeakyReLU(0.02), None),
        (nn.PReLU(), None),
        (nn.Sequential(nn.ReLU()), None),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (F.gelu, "gelu"),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
        (functools.partial(F.gelu), "gelu"),
        (functools.partial(F.leaky_relu, negative_slope=0.3), None),
        (F.silu, "silu"),
        (F.tanh, "tanh"),
        (torch.tanh, "tanh"),
        (F.sigmoid, "sigmoid"),
        (torch.sigmoid, "sigmoid"),
        (F.leaky_relu, "leaky_relu"),
        (torch.cos, None),
        ("gelu_new", "gelu_tanh"),
        ("swoosh", None),
        (None, None),
    ],
)
def test_activations_are_recognised(activation: object, name: str | None) -> None:
    found = torch_module_activation(activation)
    assert found == name
    if name is not None and callable(activation):
        z = torch.linspace(-6, 6, 101)
        assert torch.equal(activation(z.clone()), ACTIVATIONS[name].torch(z))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_torchs_functions_are_recognised_in_every_place(name: str) -> None:
    """By themselves, and called in a method, where they have to be known as formulas."""
    functions = {getattr(place, name) for place in (F, torch) if hasattr(place, name)}

    class Calls(nn.Module):
        def __init__(self, function: Callable[..., Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, z: Tensor) -> Tensor:
            return self.function(z)

    for function in functions:
        assert torch_module_activation(function) == name
        assert torch_module_activation(Calls(function)) == name


def test_a_rule_may_name_the_activation() -> None:
    block = GatedBlock(F.silu)
    del block.act
    rule = FFNRule(
        GatedBlock, up="fc", down="proj", gate="gate", activation="swish", dropout="p", output_dropout="drop",
        trusted=True,
    )  # fmt: skip
    [entry] = fl.replace(block, rules=[rule]).replaced
    assert entry.reason == "fc, gate, proj: gated silu, 6 -> 10 -> 6, as a trusted rule says"


class Swish(nn.Module):
    def __init__(self, beta: float = 1.0, cut: float | None = None) -> None:
        super().__init__()
        self.beta, self.cut = beta, cut

    def forward(self, z: Tensor) -> Tensor:
        y = z * torch.sigmoid(self.beta * z)
        return y if self.cut is None else y.clamp(-self.cut, self.cut)


class LearntSlope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.01))

    def forward(self, z: Tensor) -> Tensor:
        return torch.where(z > 0, z, self.slope * z)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (TanhGELU(), "gelu_tanh"),
        (Swish(), "silu"),
        (Swish(1.702), "quick_gelu"),
        (Swish(1.5), None),
        (Swish(cut=100.0), None),
        (LearntSlope(), None),
        (nn.Softplus(), None),
        (nn.ReLU6(), None),
        (nn.Dropout(0.0), None),
        (nn.RReLU(), None),
        (nn.Softmax(-1), None),
        (lambda z: z.clamp(min=0) ** 2, None),
        (lambda z: z.relu().detach(), None),
        (torch.erf, None),
        (GLU(), None),
        (print, None),
    ],
)
def test_activations_are_known_by_their_source(activation: Callable[..., Tensor], name: str | None) -> None:
    assert torch_module_activation(activation) == name
    assert torch_module_activation(activation) == name


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_activations_are_known_where_no_gradients_are_made(without_gradients: Callable[[], Any]) -> None:
    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(3 * x)

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with without_gradients():
        assert torch_module_activation(Swish()) == "silu"
        assert len(fl.replace(model).replaced) == 1
        model[1] = Unknown()
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), model[2](model[1](model[0](x))))


def test_an_activation_that_is_exchanged_later_is_noticed() -> None:
    block, x = Torchtune(), torch.randn(2, K)
    block.activation = Swish()
    fl.replace(block)
    for _ in range(3):
        block(x)
    block.activation = Swish(1.5)
    hidden = Swish(1.5)(block.w1(x)) * block.w3(x)
    assert torch.equal(block(x), block.w2(hidden))


def slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z)


class OfFunctions(nn.Module):
    """Calls a function of its module, and a method of its own."""

    def scaled(self, z: Tensor) -> Tensor:
        return z

    def forward(self, z: Tensor) -> Tensor:
        return self.scaled(z) * slope(z)


def _by_function(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "slope", lambda z: 2 * torch.sigmoid(z))


def _by_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OfFunctions, "scaled", lambda self, z: 2 * z)


@pytest.mark.parametrize("change", [_by_function, _by_method])
@pytest.mark.parametrize("block", [Torchtune, lambda: nn.Sequential(nn.Linear(K, 8), nn.Identity(), nn.Linear(8, K))])
def test_functions_that_an_activation_calls_are_watched(
    change: Callable[[pytest.MonkeyPatch], None], block: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    ours, x = block(), torch.randn(2, K)
    if isinstance(ours, nn.Sequential):
        ours[1] = OfFunctions()
    else:
        ours.activation = OfFunctions()
    theirs = copy.deepcopy(ours)
    assert torch_module_activation(OfFunctions()) == "silu"
    assert len(fl.replace(ours).replaced) == 1
    for _ in range(3):
        torch.testing.assert_close(ours(x), theirs(x))
    change(monkeypatch)
    torch.testing.assert_close(ours(x), theirs(x))
    monkeypatch.undo()
    assert torch_module_activation(OfFunctions()) == "silu"


@pytest.mark.parametrize(
    "activation",
    [
        lambda z: F.gelu(z).clamp(-20, 20),
        lambda z: torch.nan_to_num(F.silu(z)),
        lambda z: F.silu(z) if z.shape[0] < 512 else z,
        lambda z: F.silu(z) if z.requires_grad else z,
        lambda z: F.silu(z) if torch.is_grad_enabled() else z,
        lambda z: F.silu(z) * len(ACTIVATIONS) / len(ACTIVATIONS),
        lambda z: F.silu(z.float()),
        lambda z: F.silu(z).flip(0),
        lambda z: F.silu(z, inplace=True),
        lambda z: F.dropout(F.silu(z), 0.5),
    ],
)
def test_what_may_compute_something_else_is_no_activation_of_ours(activation: Callable[[Tensor], Tensor]) -> None:
    assert torch_module_activation(activation) is None


def test_a_lambda_is_read_where_it_stands() -> None:
    one, two = (lambda z: z * torch.sigmoid(z)), (lambda z: z.relu() ** 2)
    assert [torch_module_activation(each) for each in (one, two)] == ["silu", "relu2"]
