"""A decorator around a method sees the function that its author decorated, although the method holds a fused FFN."""

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
from tests.support.ffn_blocks import count_fused_calls


def with_factor(function: Any) -> Any:
    function.factor = 2.0
    return function


def reading(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that reads something of what it is around, and multiplies by it."""

    def decorator(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: nn.Module, *args: Tensor) -> Tensor:
            return function(self, *args) * read(function)

        return wrapper

    return decorator


def counted(function: Any) -> int:
    function.calls = getattr(function, "calls", 0) + 1
    return function.calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)


class Attribute(Block):
    @reading(lambda function: function.factor)
    @with_factor
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Annotations(Block):
    @reading(lambda function: len(function.__annotations__))
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Docstring(Block):
    @reading(lambda function: len(function.__doc__))
    def forward(self, x: Tensor) -> Tensor:
        """What it computes."""
        return x + self.down(F.gelu(self.up(x)))


class Counts(Block):
    @reading(counted)
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("kind", [Attribute, Annotations, Docstring])
def test_the_decorator_reads_the_same(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    fused_calls = count_fused_calls(monkeypatch)
    own, x = kind(), torch.randn(3, 6)
    twin = copy.deepcopy(own)
    assert fl.replace(twin).replaced
    torch.testing.assert_close(twin(x), own(x))
    assert len(fused_calls) == 1


def test_what_a_decorator_counts_is_one_number() -> None:
    own, x = Counts(), torch.randn(3, 6)
    first = own(x)
    twin = copy.deepcopy(own)
    assert fl.replace(twin).replaced
    torch.testing.assert_close(twin(x), 2 * first)
    torch.testing.assert_close(own(x), 3 * first)
    assert Counts.forward.__wrapped__.calls == 3  # type: ignore[attr-defined]
