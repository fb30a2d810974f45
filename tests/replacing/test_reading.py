"""What the reader makes of source: formulas that are equal for every input, what it refuses, and common blocks."""

from __future__ import annotations

import copy
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing.reading.polynomials import Polynomial, atom, function, mean, number, power
from fusedlayers.replacing.reading.reader import Reader
from fusedlayers.replacing.reading.sources import tree_of
from fusedlayers.replacing.reading.values import Formula, NotUnderstood
from tests.support.written import written

X = atom("input", "x")
K, N = 16, 32


class Empty(nn.Module):
    """Each formula below is the body of its forward."""


def read(body: str) -> Polynomial:
    """The formula of a forward."""
    block = written(Empty, body)()
    reader = Reader(block)
    result = reader.read(type(block).forward, reader.input(K))
    assert isinstance(result, Formula)
    return result.value


def gelu_written_out(self: nn.Module, x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def of_torch(self: nn.Module, x: Tensor) -> Tensor:
    """With a docstring, which

    is indented in the source, and may be another one in the code.
    """
    return F.gelu(x, approximate="tanh")


FORMULAS = {
    "return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))": function("gelu", X),
    "inner = 0.7978845608 * (x + 0.044715 * x**3)\nreturn x / 2 + x * torch.tanh(inner) * 0.5": function(
        "gelu_tanh", X
    ),
    "y = x.float()\ny = y * y.sigmoid()\nreturn y.to(x.dtype)": function("silu", X),
    "y = x + 1\ny *= y\nreturn y - 2 * x - 1": X * X,
}


@pytest.mark.parametrize("body", FORMULAS)
def test_two_ways_to_write_a_formula_are_one(body: str) -> None:
    assert read(body) == FORMULAS[body]


def test_a_docstring_is_no_part_of_a_formula() -> None:
    block = type("Block", (nn.Module,), {"forward": of_torch})()
    reader = Reader(block)
    assert reader.read(of_torch, reader.input(K)).value == function("gelu_tanh", X)


def test_what_is_not_equal_stays_apart() -> None:
    assert function("gelu", X) != function("gelu_tanh", X)
    assert function("silu", X) != function("quick_gelu", X)
    assert power(X * X, 0.5) != X, "of negative numbers it is not"
    assert mean(X * X) != mean(X) * mean(X)
    assert number(0.5) * X != number(0.50001) * X
    assert power(X, -1.0) * X != number(1.0), "0 / 0 is no number"


def test_a_mean_is_linear_and_takes_numbers_of_rows_out() -> None:
    centred = X - mean(X)
    assert mean(centred) == number(0.0)
    assert mean(centred * centred) == mean(X * X) - mean(X) * mean(X)


def test_every_name_of_an_overwritten_tensor_changes() -> None:
    assert read("y = x * 2\nz = y\ny.mul_(3)\nreturn z") == number(6.0) * X
    assert read("y = x * 2\npair = (y, x)\ny.mul_(3)\nreturn pair[0]") == number(6.0) * X
    for body in ("x.mul_(3)\nreturn x", "y = x * 2\nz = y.view(-1, y.shape[-1])\ny.mul_(3)\nreturn z"):
        with pytest.raises(NotUnderstood, match="overwrites a tensor that has another name in `"):
            read(body)
    for statement, why in (
        ("F.leaky_relu(y, 0.01, True)", "gives options to leaky_relu"),
        ("F.relu(y, inplace=self.training)", "decides inplace at every call"),
    ):
        with pytest.raises(NotUnderstood, match=why):
            read(f"y = x * 2\n{statement}\nreturn y")


class Option(nn.Module):
    """An activation that overwrites its input where an option says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inplace = True

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        F.relu(y, inplace=self.inplace)
        return y


def test_an_option_may_say_that_a_tensor_is_overwritten() -> None:
    reader = Reader(Option())
    assert reader.read(Option.forward, reader.input(K)).value == function("relu", number(2.0) * X)


def test_an_identity_with_a_forward_of_its_own_is_called() -> None:
    block = nn.Sequential(nn.Linear(K, N), nn.Identity())
    block[1].forward = lambda x: x * 2  # type: ignore[method-assign]
    reader = Reader(block)
    with pytest.raises(NotUnderstood, match="whose forward was set on the instance"):
        reader.read(nn.Sequential.forward, reader.input(K))


@pytest.mark.parametrize(
    "body",
    [
        "pair = (*x, 1)\nreturn pair[0]",
        "for _ in range(1.5):\n    x = x * 2\nreturn x",
        "y, _ = (x * 2).split(1.5, -1)\nreturn y",
    ],
)
def test_what_would_raise_or_means_something_else_is_refused(body: str) -> None:
    with pytest.raises(NotUnderstood):
        read(body)


def test_code_that_its_source_does_not_say_is_refused() -> None:
    def other(self: nn.Module, x: Tensor) -> Tensor:
        return x * 3

    changed = types.FunctionType(
        gelu_written_out.__code__.replace(co_consts=other.__code__.co_consts), gelu_written_out.__globals__
    )
    assert tree_of(gelu_written_out).name == "gelu_written_out"
    consts = tuple("none" if each == "tanh" else each for each in of_torch.__code__.co_consts)
    renamed = types.FunctionType(of_torch.__code__.replace(co_consts=consts), of_torch.__globals__)
    for each in (changed, renamed):
        with pytest.raises(NotUnderstood, match="source"):
            tree_of(each)


class WithAttention(nn.Module):
    """As DETR's layers and many a tutorial's: attention and FFN in one method."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(K, 2, dropout=0.1)
        self.linear1, self.linear2, self.activation = nn.Linear(K, N), nn.Linear(N, K), F.relu
        self.dropout, self.dropout1, self.norm = nn.Dropout(0.1), nn.Dropout(0.1), nn.LayerNorm(K)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.attention(x, x, value=x, attn_mask=mask)[0]
        x = self.norm(x + self.dropout1(y))
        y = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return x + self.dropout1(y)


class Gate(nn.Module):
    """As in diffusers: the second half is the gate, which a method activates."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(K, 2 * N)

    def activate(self, gate: Tensor) -> Tensor:
        return F.gelu(gate)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.proj(x).chunk(2, dim=-1)
        return hidden * self.activate(gate)


class ModulesInARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([Gate(), nn.Dropout(0.1), nn.Linear(N, K)])

    def forward(self, x: Tensor) -> Tensor:
        for module in self.net:
            x = module(x)
        return x


class ThroughViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(K, N), nn.Linear(N, K), nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x.view_as(x)), self.w3(x.view_as(x))
        return self.w2(F.silu(gate) * up)


COMMON = {
    "attention": (WithAttention, "linear1, linear2: relu, 16 -> 32 -> 16"),
    "modules in a row": (ModulesInARow, "net.0.proj, net.2: gated gelu, 16 -> 32 -> 16"),
    "views": (ThroughViews, "w3, w1, w2: gated silu, 16 -> 32 -> 16"),
    "gate in a sequence": (lambda: nn.Sequential(Gate(), nn.Linear(N, K)), "0.proj, 1: gated gelu, 16 -> 32 -> 16"),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_blocks_are_fused_and_compute_the_same(name: str) -> None:
    build, reason = COMMON[name]
    model = nn.ModuleDict({"block": build()}).eval()
    twin, x = copy.deepcopy(model), torch.randn(3, 2, K)
    [entry] = fl.replace(model).replaced
    assert entry.reason == reason
    torch.testing.assert_close(model["block"](x), twin["block"](x))


class HeadOfAList(nn.Module):
    """As the heads of detectors: the last of its linears has no activation behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(K, N), nn.Linear(N, N), nn.Linear(N, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if place < 2 else layer(x)
        return x


def test_a_part_of_a_row_of_modules_is_left() -> None:
    model, x = nn.ModuleDict({"head": HeadOfAList(), "block": ModulesInARow()}), torch.randn(3, K)
    expected = model["head"](x)
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["block"]
    assert torch.equal(model["head"](x), expected)


def test_a_helper_method_that_is_changed_later_runs() -> None:
    model = nn.ModuleDict({"block": ModulesInARow()}).eval()
    x = torch.randn(3, K)
    fl.replace(model)
    model["block"](x)
    Gate.activate, own = (lambda self, gate: gate * 0), Gate.activate  # type: ignore[method-assign, assignment]
    try:
        assert torch.equal(model["block"](x), model["block"].net[2].bias.expand(3, K))
    finally:
        Gate.activate = own  # type: ignore[method-assign]
