"""FFNs inside a method: it runs with one call in their place, or as it is, where it uses their parts for more."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from tests.support.ffn_blocks import (
    Layer,
    TaggedTensor,
    assert_same,
    count_fused_calls,
    pair,
    pickled,
    results,
)
from tests.support.written import written


class InPlace(Layer):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.act = nn.SiLU(inplace=True)


class Gated(Layer):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.gate: nn.Module | None = nn.Linear(6, 10)


class Packed(Layer):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.up = nn.Linear(6, 20)


class InRows(Layer):
    """Keeps its linears in a list, and what is between them in a dictionary."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.linears = nn.ModuleList([self.up, self.down])
        self.between = nn.ModuleDict({"act": self.act})
        del self.up, self.down, self.act


class InSuper(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) + super().extra_repr().count("x")


class Into(nn.Module):
    """Takes more than the FFN does, and gives the hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(6), nn.Linear(6, 10), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(self.norm(x) + 1))


class OutOf(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop, self.down, self.norm = nn.Dropout(p), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        hidden = self.down(self.drop(hidden))
        return self.norm(hidden + x)


class InChildren(nn.Module):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.into, self.out_of = Into(), OutOf(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_of(self.into(x), x=x) + x


# A layer's forward, and how often its FFN is computed in one piece.
FORWARDS: dict[str, tuple[type[Layer], str, int]] = {
    "DropoutForAll": (
        Layer,
        "x = x + self.drop(self.attention(x))\nreturn x + self.drop(self.down(self.drop(self.act(self.up(x)))))",
        1,
    ),
    "NumberForAll": (
        Layer,
        "x = x + F.dropout(self.attention(x), self.p, self.training)\n"
        "hidden = F.dropout(self.act(self.up(x)), p=self.p, training=self.training)\n"
        "return F.dropout(self.down(hidden), self.p, self.training)",
        1,
    ),
    "NumberReadFirst": (
        Layer,
        "p, training = self.p, self.training\n"
        "return self.down(F.dropout(input=self.act(self.up(x)), p=p, training=training))",
        1,
    ),
    "ActivationForAll": (Layer, "return self.act(self.down(self.act(self.up(self.act(x)))))", 1),
    "TwoFFNs": (
        Layer,
        "first = self.act(self.up(x))\nreturn self.down(self.act(self.up(x + 1))) + self.down(first)",
        2,
    ),
    # The down linear is none of the FFN's alone.
    "Tied": (
        Layer, "return self.down(self.act(self.up(x))) + self.down(x.repeat_interleave(2, -1)[..., :10])", 1
    ),
    "InPlaceEverywhere": (
        InPlace,
        "hidden = self.up(x)\nself.act(hidden)\n"
        "nn.functional.dropout(hidden, self.p, self.training, inplace=True)\nreturn self.down(hidden)",
        1,
    ),
    "ByName": (Layer, "return self.down(input=self.act(input=self.up(input=x)))", 1),
    # The activation is no part, and no function of torch's.
    "WrittenOut": (
        Layer,
        "hidden = self.up(x)\nhidden = hidden * 0.5 * (1.0 + torch.erf(hidden / 2**0.5))\n"
        "return x + self.down(hidden)",
        1,
    ),
    "InPlaceProduct": (
        Gated,
        "x = x + 1\nhidden = self.act(self.gate(x))\nhidden *= self.up(x)\nreturn x + self.down(hidden)",
        1,
    ),
    "Halves": (
        Packed,
        "both = self.up(x).chunk(2, dim=-1)\ngate, up = both\n"
        "return x + self.down(self.act(gate) * up)"
        " + self.down(self.norm(x.repeat_interleave(2, -1)[..., :10]))",
        1,
    ),
    "Conditional": (
        Layer,
        "hidden = self.act(self.up(x)) if self.p < 1 else self.up(x)\n"
        "if self.p > 2:\n    hidden = hidden * 2\nreturn x + self.down(hidden)",
        1,
    ),
    "Rows": (
        InRows,
        "up, act = self.linears[0], self.between['act']\n"
        "return x + self.linears[-1](nn.functional.dropout(act(up(x)), self.p, self.training))",
        1,
    ),
    "MaybeGated": (
        Gated,
        "if self.gate is not None and not hasattr(self, 'plain'):\n"
        "    hidden = self.act(self.gate(x)) * self.up(x)\n"
        "else:\n    hidden = self.act(self.up(x))\nreturn x + self.down(hidden)",
        1,
    ),
}  # fmt: skip
KINDS: dict[str, type[nn.Module]] = {
    name: written(base, body, name=name) for name, (base, body, _) in FORWARDS.items()
} | {"InSuper": InSuper, "InChildren": InChildren}
FUSED = {KINDS[name]: FORWARDS[name][2] if name in FORWARDS else 1 for name in KINDS}
each_kind = pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


def replaced(kind: type[nn.Module], p: float) -> tuple[Any, Any]:
    own, twin = pair(kind, p)
    assert fl.replace(twin).replaced
    return own, twin


@each_kind
@pytest.mark.parametrize("training", [True, False])
def test_results_and_gradients_are_the_methods_own(
    kind: type[nn.Module], training: bool, fused_calls: list[float]
) -> None:
    """Masks are drawn one after the other, as the method does: none is lost, and none drawn twice."""
    own, twin = replaced(kind, 0.25)
    x = torch.randn(2, 3, 6)
    ours, theirs = results(twin.train(training), x), results(own.train(training), x)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], msg=lambda text, name=name: f"{name}: {text}")
    assert len(fused_calls) == FUSED[kind]
    for other in (copy.deepcopy(twin), pickled(twin)):
        assert_same(results(other, x), ours)
    assert len(fused_calls) == 3 * FUSED[kind]


def test_an_option_that_decides_is_asked_at_every_call(fused_calls: list[float]) -> None:
    own, twin = replaced(KINDS["Conditional"], 0.25)
    for p in (1.5, 2.5, 0.25):
        own.p = twin.p = p
        x = torch.randn(3, 6)
        torch.testing.assert_close(twin(x), own(x))
    assert len(fused_calls) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_child_that_decides_is_asked_for_at_every_call(compiled: bool, fused_calls: list[float]) -> None:
    own, twin = replaced(KINDS["MaybeGated"], 0.25)
    torch._dynamo.reset()
    run = torch.compile(twin, backend="eager", fullgraph=True) if compiled else twin
    x = torch.randn(3, 6)
    torch.testing.assert_close(run(x), own(x))
    gate, twin.gate, own.gate = twin.gate, None, None
    torch.testing.assert_close(run(x), own(x))
    own.gate = twin.gate = gate
    own.plain = twin.plain = True
    torch.testing.assert_close(run(x), own(x))
    assert compiled or len(fused_calls) == 1


@pytest.mark.parametrize("kind", [InChildren, KINDS["Halves"]])
def test_tensors_that_are_not_plain_go_through_the_parts(kind: type[nn.Module], fused_calls: list[float]) -> None:
    own, twin = replaced(kind, 0.0)
    x = torch.randn(3, 6).as_subclass(TaggedTensor)
    assert torch.equal(twin(x), own(x))
    assert not fused_calls


def doubling(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * method(self, x)

    return doubled


class Decorated(Layer):
    @doubling
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def test_a_decorator_stays_around_its_method(fused_calls: list[float]) -> None:
    own, twin = replaced(Decorated, 0.0)
    x = torch.randn(3, 6)
    torch.testing.assert_close(twin(x), own(x))
    assert len(fused_calls) == 1


def test_another_process_finds_the_same_method(tmp_path: Path) -> None:
    own, twin = replaced(InChildren, 0.0)
    x = torch.randn(3, 6)
    torch.save((twin, x, own(x)), tmp_path / "layer.pt")
    program = f"""
import torch
from fusedlayers.replacing.ffn.by_rule import FusedInside
run = FusedInside.run_inside
FusedInside.run_inside = lambda self, x: print("in one piece") or run(self, x)
layer, x, y = torch.load({str(tmp_path / "layer.pt")!r}, weights_only=False)
torch.testing.assert_close(layer(x), y)
print(type(layer).__name__)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "in one piece\nFusedInChildren\n"


def test_in_inference_mode() -> None:
    _, twin = replaced(KINDS["DropoutForAll"], 0.0)
    with torch.inference_mode():
        assert twin(torch.randn(3, 6)).shape == (3, 6)


def test_an_error_shows_the_line_of_the_author() -> None:
    _, twin = replaced(InChildren, 0.0)
    with pytest.raises(RuntimeError) as caught:
        twin(torch.randn(3, 7))
    assert any(__file__ == entry.path.__fspath__() and "self.norm(x) + 1" in str(entry) for entry in caught.traceback)


@pytest.mark.parametrize("kind", [KINDS["DropoutForAll"], KINDS["NumberForAll"]])
def test_every_dropout_drops(kind: type[Layer]) -> None:
    """Of what p = 0.9 drops everywhere: ones stay 0.1 of the time after each dropout."""
    _, twin = replaced(kind, 0.9)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.attention.bias.fill_(1.0)
        twin.down.bias.fill_(1.0)
    y = twin(torch.zeros(2000, 6))
    if kind is KINDS["NumberForAll"]:
        assert 0.05 < (y != 0).float().mean() < 0.15
    else:
        assert 0.14 < (y != 0).float().mean() < 0.24


@pytest.mark.parametrize(
    "name", ["DropoutForAll", "NumberForAll", "TwoFFNs", "WrittenOut", "InPlaceProduct", "Halves", "InChildren"]
)
def test_compiled(name: str) -> None:
    own, twin = replaced(KINDS[name], 0.0)
    torch._dynamo.reset()
    x = torch.randn(4, 6)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    # Dynamo lists torch's functions once in a process, as they are then; `results` puts another dropout there.
    compiled(x)
    theirs = results(own, x)
    for name, tensor in results(twin, x, call=lambda *inputs: compiled(*inputs)).items():
        torch.testing.assert_close(tensor, theirs[name])


def functional(up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
    return down(torch.relu(up(x)))


class Given(Layer):
    """Whose methods are given the linears that they call."""

    def whole(self, up: nn.Module, x: Tensor, *, down: nn.Module) -> Tensor:
        return down(self.act(up(x)))

    def nested(self, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(self.whole(up, x, down=down))

    static = staticmethod(functional)


WHOLE = "x = x + self.whole(self.up, self.attention(x), down=self.down)\n"
GIVEN = {
    "a method": f"{WHOLE}return x",
    "a method, twice": f"{WHOLE}{WHOLE}return x",
    "a method that calls another one": "return x + self.nested(self.up, self.down, x)",
}
GIVEN_TO_OTHERS = {
    "a function": "return x + functional(self.up, self.down, self.attention(x))",
    "a static method": "return x + self.static(self.up, self.down, self.attention(x))",
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_ffn_in_a_method_that_is_given_its_linears_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_fused_calls(monkeypatch)
    own, twin = pair(written(Given, GIVEN[name]), 0.0)
    assert len(fl.replace(twin).replaced) == 1
    x = torch.randn(4, 6)
    assert_same(results(twin, x), results(own, x))
    assert len(calls) == (2 if "twice" in name else 1)
    for each in (own, twin):
        each.whole = lambda up, x, down: down(up(x))
    assert_same(results(twin, x), results(own, x))


@pytest.mark.filterwarnings("ignore:nothing was replaced")
@pytest.mark.parametrize("name", GIVEN_TO_OTHERS)
def test_an_ffn_in_a_function_that_is_given_its_linears_is_left(name: str) -> None:
    [entry] = fl.replace(written(Given, GIVEN_TO_OTHERS[name])(0.0)).skipped
    call = GIVEN_TO_OTHERS[name].removeprefix("return x + ")
    assert entry.reason == f"up, down: its forward runs its FFN in `{call}`, which is no method of it"
    assert entry.is_ffn_left
