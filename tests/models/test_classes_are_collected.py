"""Nothing that `replace` remembers keeps a class, function or module of the user's alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.parallel import experts
from tests.models.loss_heads import build, in_kernels, losses, replaced, text

Made = tuple[nn.Module, tuple[Any, ...], list[Any]]


def collect() -> None:
    # Classes are cycles, and those that were made hold the originals: one goes after the other.
    for _ in range(3):
        gc.collect()


def own_activation_class() -> Made:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * x

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 16), Own(), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    return Block(), (torch.randn(3, 8),), [Own, Block]


def own_activation_function() -> Made:
    def own(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), own

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.gate(x)) * self.up(x))

    return Block(), (torch.randn(3, 8),), [own, Block]


def method_of_a_layer() -> Made:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.down(F.gelu(self.up(x))))

    return Layer(), (torch.randn(3, 8),), [Layer]


def own_norm() -> Made:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    return nn.Sequential(Norm()), (torch.randn(3, 8),), [Norm]


@pytest.mark.parametrize("make", [own_activation_class, own_activation_function, method_of_a_layer, own_norm])
@pytest.mark.parametrize("restored", [False, True])
def test_what_replace_saw_is_collected(make: Callable[[], Made], restored: bool) -> None:
    model, inputs, used = make()
    report = fl.replace(model)
    assert report.replaced
    model(*inputs).sum().backward()
    used += [type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")]
    if restored:
        fl.restore(model)
    watched = [weakref.ref(each) for each in (*used, model)]
    del model, report, used
    collect()
    assert [each() for each in watched] == [None] * len(watched)


@pytest.mark.interpreter
def test_a_causal_model_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")
    model: Any = build("Llama")
    kind = type(model)
    model.__class__ = type(
        "Own", (kind,), {"__module__": __name__, "forward": kind.forward, "loss_type": "ForCausalLM"}
    )
    original = type(model)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        model(**text()).loss.backward()
    assert losses(paths) == 1
    watched = [weakref.ref(each) for each in (original, type(model), model)]
    del model, original
    collect()
    assert [each() for each in watched] == [None] * 3


def test_experts_in_parts_are_collected() -> None:
    class Own(fl.FusedMoE):
        pass

    made = experts._class_for(Own)
    assert experts._class_for(Own) is made
    watched = [weakref.ref(Own), weakref.ref(made)]
    del Own, made
    collect()
    assert [each() for each in watched] == [None] * 2


def test_a_class_is_made_once_while_somebody_has_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    one, other = Block(), Block()
    fl.replace(one)
    fl.replace(other)
    assert type(one) is type(other) is not Block
