"""Blocks whose forward takes one tensor in another way than usual, or options beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ffn_blocks import replaced

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


class FactorOrOne(Block):
    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        return x + self.down(F.gelu(self.up(x)) * (scale or 1.0))


class Probability(Block):
    def forward(self, x: Tensor, p: float = 0.0) -> Tensor:
        torch.manual_seed(1)
        return x + self.down(F.dropout(F.gelu(self.up(x)), p, True))


class Power(Block):
    def forward(self, x: Tensor, *, power: int = 2) -> Tensor:
        return x + self.down(F.relu(self.up(x)) ** power)


class Updated(Block):
    def forward(self, x: Tensor, **options: float) -> Tensor:
        given = {"scale": 1.0}
        given.update(options)
        return x + self.down(F.gelu(self.up(x)) * given["scale"])


class Matched(Block):
    def forward(self, x: Tensor, mode: tuple[str, float] = ("scaled", 2.0)) -> Tensor:
        scale = 1.0
        match mode:
            case ("scaled", scale):
                pass
        return x + self.down(F.gelu(self.up(x)) * scale)


OPTIONS: dict[type[Block], dict[str, Any]] = {
    WithAnOption: {"scale": 2.0}, FactorOrOne: {"scale": 3.0}, Probability: {"p": 0.5}, Power: {"power": 3},
    Updated: {"scale": 3.0}, Matched: {"mode": ("other", 3.0)},
}  # fmt: skip


@pytest.mark.parametrize("kind", Block.__subclasses__())
def test_forwards_that_take_one_tensor(kind: type[Block]) -> None:
    """Computed as the author wrote it, without options and with them."""
    torch.manual_seed(0)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    if kind in (PositionalOnly, SelfToo, WithAnOption, KeywordOnly, Several):
        assert type(block) is not kind
    args, tensors = ((), {"x": x}) if kind is KeywordOnly else ((x,), {})
    for options in ({}, OPTIONS.get(kind, {})):
        for _ in range(2):
            expected = original(*args, **tensors, **options)
            torch.testing.assert_close(block(*args, **tensors, **options), expected)
