"""Modules that were replaced are pickled by what was read in them: functions, properties and bound methods, too."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from tests.support.ffn_blocks import assert_same, count_fused_calls, pickled, results


def own_silu(hidden: Tensor) -> Tensor:
    return hidden * torch.sigmoid(hidden)


nameless: Callable[[Tensor], Tensor] = lambda hidden: F.gelu(hidden)  # noqa: E731


def root_mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


class CallsFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(own_silu(self.up(x)))


class CallsFunctionInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(own_silu(self.up(x)))


class CallsLambda(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nameless(self.up(x)))


class ReadsProperty(Block):
    @property
    def act(self) -> Callable[[Tensor], Tensor]:
        return F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class KeepsItsMethod(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = self.activated

    def activated(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(root_mean_square(x) + 1e-6))


FFNS: tuple[type[nn.Module], ...] = (CallsFunction, CallsFunctionInside, CallsLambda, ReadsProperty, KeepsItsMethod)


def replaced(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    module = kind()
    [entry] = fl.replace(module).replaced
    assert entry.became == f"Fused{kind.__name__}"
    return module


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", FFNS)
def test_an_ffn_is_fused_after_loading(kind: type[nn.Module], called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_calls = count_fused_calls(monkeypatch)
    module, x = replaced(kind), torch.randn(3, 6)
    if called:
        module(x)
    loaded = pickled(module)
    assert type(loaded) is type(module)
    expected = results(module, x)
    fused_calls.clear()
    assert_same(results(loaded, x), expected)
    assert len(fused_calls) == 1
    fl.restore(loaded)
    assert type(loaded) is kind


def test_a_norm_is_fused_after_loading() -> None:
    module, x = replaced(Norm), torch.randn(3, 6)
    for other in (pickled(module), copy.deepcopy(module)):
        assert type(other) is type(module)
        assert other.why_called(x) is None
        torch.testing.assert_close(other(x), module(x))


@pytest.mark.parametrize("name", ["own_silu", "nameless"])
def test_what_was_changed_before_pickling_stays_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = replaced(CallsLambda if name == "nameless" else CallsFunction), torch.randn(3, 6)
    monkeypatch.setattr(sys.modules[__name__], name, F.relu)
    for other in (copy.deepcopy(module), pickled(module)):
        assert f"the {name} of {__name__} was changed" in str(other.why_called(x))
        torch.testing.assert_close(other(x), module.down(F.relu(module.up(x))))


def test_a_function_that_is_gone_is_missed_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = replaced(CallsFunction)
    monkeypatch.delattr(sys.modules[__name__], "own_silu")
    with pytest.raises(NameError, match="own_silu"):
        pickled(module)(torch.randn(3, 6))
