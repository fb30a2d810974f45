"""Linears in lists and dictionaries of modules: which FFNs of theirs are fused, and what the report says of others."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from tests.support.ffn_blocks import count_fused_calls
from tests.support.written import written

pytestmark = pytest.mark.filterwarnings("ignore:nothing was replaced")

# What the bodies of the forwards below use.
__all__ = ["F"]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


class Parallel(nn.Module):
    """The linears of several FFNs, in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(10, 6) for _ in range(3))


class Pairs(nn.Module):
    """The linears of each FFN in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)]) for _ in range(2))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})


class Perceptron(nn.Module):
    """Any number of layers, as DETR predicts boxes."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


LOOP = "its forward runs `F.gelu(up(x))` for this FFN and for something else"
# A class, its forward, the path of the one entry for what is left, and its reason.
LEFT: dict[str, tuple[type[nn.Module], str, str, str]] = {
    "parallel": (
        Parallel,
        "for up, down in zip(self.ups, self.downs):\n    x = x + down(F.gelu(up(x)))\nreturn x",
        "",
        f"ups.0, downs.0: {LOOP}",
    ),
    "pairs": (
        Pairs,
        "for up, down in self.layers:\n    x = x + down(F.gelu(up(x)))\nreturn x",
        "",
        f"layers.0.0, layers.0.1: {LOOP}",
    ),
    "used again": (
        Named,
        "hidden = F.gelu(self.of['up'](x))\nreturn x + self.of['down'](hidden), hidden",
        "of",
        "looks like an FFN (up, down: 6 -> 10 -> 6), but Written, which holds them, is left: "
        "its forward returns no tensor",
    ),
    "method of a dictionary": (
        Named,
        "up, down = self.of.values()\nreturn x + down(F.gelu(up(x)))",
        "of",
        "looks like an FFN (up, down: 6 -> 10 -> 6), but Written, which holds them, is left: "
        "its forward reads of._modules.values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_an_ffn_in_a_list_is_left_with_a_reason_of_its_owner(name: str) -> None:
    base, body, path, reason = LEFT[name]
    [entry] = fl.replace(written(base, body)()).skipped
    assert (entry.path, entry.is_ffn_left) == (path, True)
    assert entry.reason.startswith(reason)


@pytest.mark.parametrize("widths", [(6, 6, 6, 4), (6, 10, 10, 6), (6, 10, 4, 4, 2)], ids=str)
def test_a_perceptron_of_more_than_two_layers_is_left(widths: tuple[int, ...]) -> None:
    model = Perceptron(*widths)
    [entry] = fl.replace(model).skipped
    last, before = len(widths) - 2, len(widths) - 3
    assert (
        entry.reason == f"layers.{before}, layers.{last}: its forward computes the FFN of something else than its input"
    )
    with pytest.raises(ValueError, match="FFNs of it would not be fused"):
        fl.replace(nn.ModuleList([model, Perceptron(6, 10, 6)]), strict=True)
    assert fl.replace(Perceptron(6, 10, 6)).replaced


class Two(Named):
    """Two FFNs, in two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.of)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.of["down"](F.gelu(self.of["up"](x)))
        return x + self.other["down"](F.gelu(self.other["up"](x)))


class TwoPairs(Pairs):
    def forward(self, x: Tensor) -> Tensor:
        one, two = self.layers
        x = x + one[1](F.gelu(one[0](x)))
        return x + two[1](F.gelu(two[0](x)))


class TwoOfThree(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.downs[0](F.gelu(self.ups[0](x)))
        return x + self.downs[1](F.gelu(self.ups[1](x)))


class ByIndex(Parallel):
    """A method runs the FFN whose number it is given."""

    def block(self, index: int, x: Tensor) -> Tensor:
        return x + self.downs[index](F.gelu(self.ups[index](x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(1, self.block(0, x))


SECOND = {
    Two: "other.up, other.down",
    TwoPairs: "layers.1.0, layers.1.1",
    TwoOfThree: "ups.1, downs.1",
    ByIndex: "ups.1, downs.1",
}


@pytest.mark.parametrize("kind", SECOND)
def test_a_second_ffn_of_a_method_is_left_with_a_reason(kind: type[nn.Module], fused_calls: list[float]) -> None:
    own, x = kind(), torch.randn(3, 6)
    model = copy.deepcopy(own)
    report = fl.replace(model)
    assert len(report.replaced) == 1
    [entry] = report.skipped
    assert (entry.path, entry.reason) == ("", f"{SECOND[kind]}: only one FFN of a module is fused")
    assert entry.is_ffn_left
    torch.testing.assert_close(model(x), own(x))
    assert len(fused_calls) == 1


def test_a_method_that_a_loop_calls_with_each_index_is_left() -> None:
    kind = written(ByIndex, "for index in range(3):\n    x = self.block(index, x)\nreturn x")
    [entry] = fl.replace(kind()).skipped
    assert entry.reason == (
        "ups.0, downs.0: its forward runs `self.block(index, x)` for this FFN and for something else"
    )
    assert entry.is_ffn_left


def test_a_second_ffn_keeps_its_reason_in_a_second_replace() -> None:
    model = TwoPairs()
    fl.replace(model)
    assert [entry.reason for entry in fl.replace(model).skipped] == [
        "already fused",
        "looks like an FFN (0, 1: 6 -> 10 -> 6), but FusedTwoPairs, which holds them, runs another FFN, "
        "and only one is fused",
    ]


@pytest.mark.parametrize("body", ["return down(F.gelu(up(x)))", "return x + down(F.gelu(up(x)))"])
def test_a_list_that_is_taken_apart_is_fused_while_its_length_stays(body: str) -> None:
    kind = written(Pairs, f"up, down = self.layers[0]\n{body}")
    torch.manual_seed(0)
    own, x = kind(), torch.randn(3, 6)
    block = copy.deepcopy(own)
    assert fl.replace(block).replaced
    torch.testing.assert_close(block(x), own(x))
    for module in (own, block):
        module.layers[0].append(nn.Tanh())
        with pytest.raises(ValueError, match="too many values to unpack"):
            module(x)
