"""Blocks that Dynamo traces: the kinds of values that it cannot make constants of."""

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
from tests.support.ffn_blocks import assert_same, results


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))


class OfParameter(nn.Module):
    """Calls its block with a parameter, as a Perceiver does with its latents."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.latents = block, nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.latents) + x


@pytest.mark.parametrize("make", [Block, sequence, lambda: fl.FusedFFN(6, 10)], ids=["block", "sequence", "FusedFFN"])
def test_the_input_is_a_parameter(make: Callable[[], nn.Module]) -> None:
    own, x = OfParameter(make()), torch.randn(4, 6)
    model = copy.deepcopy(own)
    fl.replace(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(results(model, x, call=lambda x: compiled(x)), results(own, x))


class Doubled:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class Choosing(Block):
    """Calls one of its methods by another name."""

    def __init__(self, _: object) -> None:
        super().__init__()
        self.hidden = self.of_relu

    def of_relu(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def of_gelu(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))

    def change(self) -> None:
        self.hidden = self.of_gelu


class Around(Block):
    """A function that is an attribute takes the result of the FFN."""

    def __init__(self, after: object) -> None:
        super().__init__()
        self.after: Any = after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.down(torch.relu(self.up(x))))

    def change(self) -> None:
        self.after = F.silu


FUNCTIONS: dict[str, tuple[type[Any], object]] = {
    "a method": (Choosing, None),
    "a function": (Around, lambda x: x + 1),
    "a function of torch": (Around, torch.tanh),
    "a partial": (Around, functools.partial(F.gelu, approximate="tanh")),
    "an object": (Around, Doubled()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_was_read_is_an_attribute(name: str) -> None:
    kind, function = FUNCTIONS[name]
    own, x = kind(function), torch.randn(4, 6)
    block = kind(function)
    block.load_state_dict(own.state_dict())
    assert len(fl.replace(block).replaced) == 1
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), own(x))
    for each in (own, block):
        each.change()
    torch.testing.assert_close(compiled(x), own(x))


class Helping(Block):
    """Methods of it run the FFN, make its hidden, and take it."""

    def whole(self, up: nn.Module, x: Tensor) -> Tensor:
        return self.down(torch.relu(up(x)))

    def hidden(self, up: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(up(x))

    def last(self, down: nn.Module, hidden: Tensor) -> Tensor:
        return down(hidden)


class Whole(Helping):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.whole(self.up, x)


class Apart(Helping):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.down, self.hidden(self.up, x))


@pytest.mark.parametrize(("kind", "method"), [(Whole, "whole"), (Apart, "hidden"), (Apart, "last")])
def test_a_method_is_set_on_the_instance(kind: type[nn.Module], method: str) -> None:
    own, x = kind(), torch.randn(4, 6)
    block = copy.deepcopy(own)
    assert len(fl.replace(block).replaced) == 1
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), own(x))
    columns = 10 if method == "hidden" else 6
    for each in (own, block):
        setattr(each, method, lambda linear, x: torch.ones(4, columns))
    torch.testing.assert_close(compiled(x), own(x))
