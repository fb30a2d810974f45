"""What somebody changes of a replaced block later, or has otherwise in another one: it computes what it says now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import ReLU

import fusedlayers as fl
from tests.replacing.test_around_blocks import UNITS, WIDTH, Block
from tests.support.ffn_blocks import replaced


class Swish(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def inner(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


def in_a_row(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, UNITS), *between, nn.Linear(UNITS, WIDTH))


class HookPoint(Block):
    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.point(F.gelu(self.up(x))))


class Asking(Block):
    """Asks whether it has an attribute, and of which class its activation is."""

    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.act: nn.Module = nn.GELU()
        if plain:
            self.plain = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        if not hasattr(self, "plain"):
            h = h * 2
        if isinstance(self.act, ReLU):
            h = h * 3
        return self.down(h)


class AskingNorm(nn.Module):
    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(WIDTH)), 1e-5
        if plain:
            self.plain = True

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight if hasattr(self, "plain") else x * (1 + self.weight)


class MaybeGated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate: nn.Module | None = nn.Linear(WIDTH, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.relu(self.up(x)))


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, UNITS)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.dense(x) + residual


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = Into(), OutOf()

    def forward(self, x: Tensor) -> Tensor:
        return self.out_of(self.into(x), x)


class Row(nn.Module):
    """The MLP of DETR's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < 1 else layer(x)
        return x


class Doubled(nn.GELU):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class DoubledInside(nn.GELU):
    def _call_impl(self, *args: Any) -> Tensor:
        return super()._call_impl(*args) * 2


def zeroed(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, inputs, output: output * 0)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "option of an activation": (lambda: in_a_row(Swish()), lambda m: setattr(m[1], "beta", 3.0)),
    "helper of an activation": (lambda: in_a_row(Swish()), lambda m: setattr(m[1], "inner", torch.relu)),
    "hook of an identity": (HookPoint, lambda m: zeroed(m.point)),
    "forward of an identity": (HookPoint, lambda m: setattr(m.point, "forward", lambda x: x * 0)),
    "hook of an identity in a row": (lambda: in_a_row(nn.GELU(), nn.Identity()), lambda m: zeroed(m[2])),
    "attribute deleted": (Asking, lambda m: delattr(m, "plain")),
    "class of an activation": (Asking, lambda m: setattr(m, "act", nn.ReLU())),
    "attribute of a norm deleted": (AskingNorm, lambda m: delattr(m, "plain")),
    "no gate": (MaybeGated, lambda m: setattr(m, "gate", None)),
    "helper of a holder": (Layer, lambda m: setattr(m.into, "act", torch.relu)),
    "another layer": (Row, lambda m: m.layers.append(nn.Identity())),
}


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_computes_what_the_block_says_now(change: str, called: bool) -> None:
    make, changed = CHANGES[change]
    torch.manual_seed(0)
    original, x = make(), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    assert fl.replace(block, strict=True).replaced
    if called:
        torch.testing.assert_close(block(x), original(x))
    changed(original)
    changed(block)
    torch.testing.assert_close(block(x), original(x))


def test_an_attribute_of_a_class_that_changes() -> None:
    original, x = in_a_row(Swish()), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    block(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Swish, "gain", 3.0)
        torch.testing.assert_close(block(x), original(x))


@pytest.mark.parametrize("kind", [Asking, AskingNorm])
def test_two_of_a_class_that_differ_in_what_they_have(kind: Callable[[bool], nn.Module]) -> None:
    original, x = nn.Sequential(kind(True), kind(False)), torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))


@pytest.mark.parametrize("activation", [Doubled, DoubledInside])
def test_an_activation_with_a_call_of_its_own_is_called(activation: Callable[[], nn.Module]) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, UNITS, 0.0, activation=activation(), batch_first=True)
    for original in (in_a_row(activation()), layer):
        x = torch.randn(2, 3, WIDTH)
        torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))
