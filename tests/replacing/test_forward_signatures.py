"""Blocks whose forward takes one tensor in another way than usual."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl

WIDTH, UNITS = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)


class PositionalOnly(Block):
    def forward(self, x: Tensor, /) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SelfToo(Block):
    def forward(block, /, x: Tensor) -> Tensor:
        return block.down(F.gelu(block.up(x)))


class WithAnOption(Block):
    def forward(self, x: Tensor, /, scale: float = 1.0) -> Tensor:
        return self.down(F.gelu(self.up(x)) * scale)


class KeywordOnly(Block):
    def forward(self, *, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Several(Block):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(xs[0])))


CASES: list[tuple[type[Block], dict[str, Any]]] = [(kind, {}) for kind in Block.__subclasses__()]


@pytest.mark.parametrize(("kind", "given"), [*CASES, (WithAnOption, {"scale": 2.0})])
def test_forwards_that_take_one_tensor(kind: type[Block], given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    assert fl.replace(block).replaced
    args, options = ((), {"x": x, **given}) if kind is KeywordOnly else ((x,), given)
    for _ in range(2):
        torch.testing.assert_close(block(*args, **options), original(*args, **options))
