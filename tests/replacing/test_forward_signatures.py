"""Blocks whose forward takes one tensor in another way than usual, or options beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  the forwards below use it
from torch import nn

from tests.support.ffn_blocks import replaced
from tests.support.written import written

WIDTH, UNITS = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)


FFN = "self.down(F.gelu(self.up(x)){})"
# Arguments, the forward, and options of a call.
FORWARDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "positional only": ("self, x, /", f"return {FFN.format('')}", {}),
    "self too": ("block, /, x", "return block.down(F.gelu(block.up(x)))", {}),
    "with an option": ("self, x, /, scale=1.0", f"return {FFN.format(' * scale')}", {"scale": 2.0}),
    "keyword only": ("self, *, x", f"return {FFN.format('')}", {}),
    "several": ("self, *xs", "return self.down(F.gelu(self.up(xs[0])))", {}),
    "option or one": ("self, x, scale=None", f"return x + {FFN.format(' * (scale or 1.0)')}", {"scale": 3.0}),
    "probability": (
        "self, x, p=0.0",
        "torch.manual_seed(1)\nreturn x + self.down(F.dropout(F.gelu(self.up(x)), p, True))",
        {"p": 0.5},
    ),
    "power": ("self, x, *, power=2", "return x + self.down(F.relu(self.up(x)) ** power)", {"power": 3}),
    "updated": (
        "self, x, **options",
        "given = {'scale': 1.0}\ngiven.update(options)\nreturn x + " + FFN.format(" * given['scale']"),
        {"scale": 3.0},
    ),
    "matched": (
        "self, x, mode=('scaled', 2.0)",
        "scale = 1.0\nmatch mode:\n    case ('scaled', scale):\n        pass\n"
        "return x + " + FFN.format(" * scale"),
        {"mode": ("other", 3.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_that_take_one_tensor(name: str) -> None:
    """Computed as the author wrote it, without options and with them; the first five are fused."""
    arguments, body, options = FORWARDS[name]
    torch.manual_seed(0)
    kind = written(Block, body, arguments)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    assert type(block) is not kind or name not in list(FORWARDS)[:5]
    args, tensors = ((), {"x": x}) if name == "keyword only" else ((x,), {})
    for given in ({}, options):
        for _ in range(2):
            torch.testing.assert_close(block(*args, **tensors, **given), original(*args, **tensors, **given))
