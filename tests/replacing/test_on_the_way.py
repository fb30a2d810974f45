"""What a method does on its way to an FFN, where a careless reading would take an old value: left, or right."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
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
        self.up, self.down, self.scale = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH), 1.0
        self.state = types.SimpleNamespace(scale=1.0)


class Factor(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.down(F.gelu(self.up(x)) * scale)


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


class HandedOn(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, scale=2.0)

    def inner(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(F.gelu(self.up(x)) * scale)


class Updated(Block):
    def forward(self, x: Tensor, **options: float) -> Tensor:
        given = {"scale": 1.0}
        given.update(options)
        return x + self.down(F.gelu(self.up(x)) * given["scale"])


class ItemWritten(Block):
    def forward(self, x: Tensor) -> Tensor:
        given = {"scale": 1.0}
        given["scale"] = 2.0
        return x + self.down(F.gelu(self.up(x)) * given["scale"])


class Appended(Block):
    def forward(self, x: Tensor) -> Tensor:
        scales = [1.0]
        scales.append(2.0)
        return x + self.down(F.gelu(self.up(x)) * scales[-1])


class FilledByAMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        scales = [1.0]
        self.fill(scales)
        return x + self.down(F.gelu(self.up(x)) * scales[0])

    def fill(self, scales: list[float]) -> None:
        scales[0] = 3.0


class Rounds(Block):
    def forward(self, x: Tensor) -> Tensor:
        scale, step = 1.0, 0
        while step < 3:
            x = x + self.down(F.gelu(self.up(x)) * scale)
            scale = scale * 0.5
            step += 1
        return x


class OtherRounds(Block):
    def forward(self, x: Tensor) -> Tensor:
        act = F.gelu
        while True:
            x = x + self.down(act(self.up(x)))
            if act is F.relu:
                return x
            act = F.relu


class Finally(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.up(x)
            return x + self.down(F.gelu(h))
        finally:
            x.add_(h.mean())


class Caught(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.up(x)
            return (x + self.down(F.gelu(h))).view(7, 7)
        except RuntimeError:
            return h.mean(-1)


class Suppressed(Block):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            h = self.up(x)
            return (x + self.down(F.gelu(h))).view(7, 7)
        return h.mean(-1)


class Walrus(Block):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if (scale := 2.0) > 1:
            x = x + 0
        return x + self.down(F.gelu(self.up(x)) * scale)


@contextlib.contextmanager
def two() -> Iterator[float]:
    yield 2.0


class Entered(Block):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        with two() as scale:  # noqa: F811
            y = self.down(F.gelu(self.up(x)) * scale)
        return x + y


class Defined(Block):
    def forward(self, x: Tensor) -> Tensor:
        act: Callable[[Tensor], Tensor] = F.relu
        if x.shape[0] > 1:

            def act(h: Tensor) -> Tensor:
                return F.relu(h) * 2

        return x + self.down(act(self.up(x)))


class Matched(Block):
    def forward(self, x: Tensor, mode: tuple[str, float] = ("scaled", 2.0)) -> Tensor:
        scale = 1.0
        match mode:
            case ("scaled", scale):
                pass
        return x + self.down(F.gelu(self.up(x)) * scale)


class Nonlocal(Block):
    def forward(self, x: Tensor) -> Tensor:
        def double() -> None:
            nonlocal scale
            scale = scale * 2

        scale = 1.0
        double()
        return x + self.down(F.gelu(self.up(x)) * scale)


class Imported(Block):
    def forward(self, x: Tensor) -> Tensor:
        e = 1.0
        from math import e  # noqa: F811

        return x + self.down(F.gelu(self.up(x)) * e)


class ObjectWritten(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.state.scale = 2.0
        y = x + self.down(F.gelu(self.up(x)) * self.state.scale)
        self.state.scale = 1.0
        return y


class Stepping:
    scale = 1.0

    def __init__(self) -> None:
        self.scale = 1.0

    def step(self) -> None:
        self.scale *= 0.5


class ObjectSteps(Block):
    def __init__(self) -> None:
        super().__init__()
        self.stepping = Stepping()

    def forward(self, x: Tensor) -> Tensor:
        self.stepping.step()
        return x + self.down(F.gelu(self.up(x)) * self.stepping.scale)


class Set(Block):
    def forward(self, x: Tensor) -> Tensor:
        setattr(self, "scale", 2.0)  # noqa: B010
        y = x + self.down(F.gelu(self.up(x)) * self.scale)
        setattr(self, "scale", 1.0)  # noqa: B010
        return y


class Cast(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.to(self.up.weight.dtype))))


class InFloat32(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.float())))


GIVEN: dict[type[Block], dict[str, Any]] = {
    Factor: {"scale": 3.0}, FactorOrOne: {"scale": 3.0}, Probability: {"p": 0.5}, Power: {"power": 3},
    Updated: {"scale": 3.0},
}  # fmt: skip
BLOCKS = [kind for kind in Block.__subclasses__() if kind not in (Cast, InFloat32)]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)
def test_the_block_computes_what_its_author_wrote(kind: type[Block]) -> None:
    torch.manual_seed(0)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    for options in ({}, GIVEN.get(kind, {})):
        for _ in range(2):
            given, other = x.clone(), x.clone()
            with torch.no_grad():
                expected, found = original(given, **options), block(other, **options)
            torch.testing.assert_close(found, expected)
            assert torch.equal(given, other), "what was written into the input"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Cast, InFloat32])
def test_an_input_that_is_cast_first_may_have_another_dtype(kind: type[Block], dtype: torch.dtype) -> None:
    original, x = kind(), torch.randn(2, 3, WIDTH, dtype=dtype)
    torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))
