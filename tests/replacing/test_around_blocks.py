"""What a block does around its FFN and no statement of ``tests/support/hostile*.py`` does: left, or right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ffn_blocks import mlp, replaced

WIDTH, UNITS = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)


class AsksClass(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y * 2 if type(self) is AsksClass else x + y


class AsksNameOfClass(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y * 2 if self.__class__.__name__ == "AsksNameOfClass" else x + y


class NamedLikeAFunction(Block):
    """The activation is torch's function, whatever else has its name."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("kind", [AsksClass, AsksNameOfClass, NamedLikeAFunction], ids=lambda kind: kind.__name__)
def test_the_block_computes_what_its_author_wrote(kind: type[Block]) -> None:
    torch.manual_seed(0)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    for _ in range(2):
        torch.testing.assert_close(block(x), original(x))


class Stop(Exception):
    pass


class StopsWithItsHidden(Block):
    def forward(self, x: Tensor, stop: bool = False) -> Tensor:
        h = F.gelu(self.up(x))
        if stop:
            raise Stop(h)
        return x + self.down(h)


def test_an_error_may_carry_the_hidden() -> None:
    block = replaced(StopsWithItsHidden())
    with pytest.raises(Stop) as found:
        block(torch.randn(2, WIDTH), stop=True)
    assert found.value.args[0].shape == (2, UNITS)


class Unused(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra, self.shift = nn.Linear(WIDTH, UNITS), nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)) + 0.0 * self.extra(x) + 0.0 * self.shift
        return x + self.down(h)


def test_what_is_multiplied_by_zero_has_gradients_of_zero() -> None:
    """As for DistributedDataParallel, which waits for the gradients of all parameters."""
    block = replaced(Unused())
    block(torch.randn(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


class Flattens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH * WIDTH, UNITS), nn.Linear(UNITS, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.view(-1, WIDTH * WIDTH)))).view(x.shape)


class Pads(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.up.in_features:
            x = F.pad(x, (0, self.up.in_features - x.shape[-1]))
        return self.down(F.relu(self.up(x)))


class Refuses(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != WIDTH:
            raise KeyError("the number of features")
        return self.down(F.relu(self.up(x)))


@pytest.mark.parametrize(("kind", "shape"), [(Flattens, (5, WIDTH, WIDTH)), (Pads, (5, WIDTH // 2))])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_input_of_another_width_goes_the_way_of_its_author(
    kind: type[nn.Module], shape: tuple[int, ...], compiled: bool
) -> None:
    torch.manual_seed(0)
    original, x = kind(), torch.randn(shape)
    block = replaced(copy.deepcopy(original))
    assert type(block) is not kind
    expected = original(x)
    if compiled:
        block = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
    torch.testing.assert_close(block(x), expected)


def test_errors_of_another_width_are_those_of_the_author() -> None:
    with pytest.raises(KeyError, match="the number of features"):
        replaced(Refuses())(torch.randn(2, WIDTH + 1))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        replaced(nn.Sequential(nn.Linear(WIDTH, UNITS), nn.ReLU(), nn.Linear(UNITS, WIDTH)))(torch.randn(2, WIDTH + 1))


@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.int64)]
)
@pytest.mark.parametrize("build", [mlp, NamedLikeAFunction])
def test_errors_of_another_dtype_are_those_of_torch(
    build: Callable[[], nn.Module], dtype: torch.dtype, other: torch.dtype
) -> None:
    block = replaced(build().to(dtype))
    x = torch.ones(2, WIDTH if build is NamedLikeAFunction else 6)
    block(x.to(dtype))
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        block(x.to(other))
    with pytest.raises(TypeError):
        block([1.0])


class Cast(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.to(self.up.weight.dtype))))


class InFloat32(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.float())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Cast, InFloat32])
def test_an_input_that_is_cast_first_may_have_another_dtype(kind: type[Block], dtype: torch.dtype) -> None:
    original, x = kind(), torch.randn(2, 3, WIDTH, dtype=dtype)
    torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))
