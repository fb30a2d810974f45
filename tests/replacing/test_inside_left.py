"""Methods that use the hidden of their FFN for more than the FFN: they run as they are, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing import FFNRule
from tests.support.ffn_blocks import Layer, assert_same, mlp, pair, results
from tests.support.written import written


class WithIdentity(Layer):
    """To which a method may hand its hidden."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.same = nn.Identity()


OTHER = "which is no activation of up(something)"
USED = "its up gives a hidden that is used for something else, too"
READ = "keeps its hidden in a variable that others may read"
NONE = "no FFN is seen in its source"
# Methods, and why they are left.
LEFT: dict[str, tuple[str, str]] = {
    "activated twice": ("return self.down(self.act(self.act(self.up(x))))", OTHER),
    "dropped twice": ("return self.down(self.drop(self.drop(self.act(self.up(x)))))", OTHER),
    "dropped first": ("return self.down(self.act(self.drop(self.up(x))))", OTHER),
    "not activated": ("return self.down(self.up(x))", OTHER),
    "scaled": ("return self.down(self.act(self.up(x)) * 0.5)", OTHER),
    "scaled before": ("return self.down(self.act(0.5 * self.up(x)))", OTHER),
    "normed": ("return self.down(self.norm(self.act(self.up(x))))", OTHER),
    "up twice": ("return self.down(self.act(self.up(x)) * self.up(x + 1))", OTHER),
    "hidden kept": ("self.seen = self.act(self.up(x))\nreturn self.down(self.seen)", NONE),
    "hidden in the result": (
        "hidden = self.act(self.up(x))\nreturn {'y': [self.down(hidden), hidden]}['y'][0] + hidden.mean()", USED
    ),
    "dropped and kept": ("hidden = self.drop(self.act(self.up(x)))\nreturn self.down(hidden) + hidden.sum()", USED),
    "handed on": (
        "return x + self.down(self.act(self.same(self.up(x))))",
        "hands its hidden to same, whose hooks nobody would ask for",
    ),
    "peeked": (
        "hidden = self.act(self.up(x))\ny = self.down(hidden)\nreturn y * locals()['hidden'].shape[-1]", READ
    ),
    "in a closure": (
        "hidden = x\ndef width():\n    return hidden.shape[-1]\n"
        "hidden = self.act(self.up(x))\nreturn self.down(hidden) * width()",
        READ,
    ),
    "some times": (
        "hidden = x\nfor each in (self.up, self.attention):\n"
        "    hidden = self.act(each(x)) if hidden is x else hidden\nreturn self.down(hidden) + x",
        NONE,
    ),
    "without gradient": (
        "with torch.no_grad():\n    hidden = self.up(x)\nreturn self.down(self.act(hidden)) + x", NONE
    ),
}  # fmt: skip


def rule(kind: type[Layer]) -> FFNRule:
    return FFNRule(kind, up="up", down="down", activation="act", inside="forward", trusted=True)


def why_left(kind: type[Layer], twin: nn.Module) -> str:
    """The reason why a layer stays as it is, whatever a trusted rule says."""
    for rules in ([], [rule(kind)]):
        [entry] = fl.replace(nn.ModuleList([twin, mlp()]), rules=rules).skipped
        assert type(twin) is kind
    return entry.reason


@pytest.mark.parametrize("name", LEFT)
def test_a_method_that_uses_its_hidden_for_more_is_left(name: str) -> None:
    body, reason = LEFT[name]
    kind = written(WithIdentity, body)
    own, twin = pair(kind, 0.25)
    assert reason in why_left(kind, twin)
    x = torch.randn(2, 3, 6)
    assert_same(results(twin, x), results(own, x))


class Overwriting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        x.add_(1)
        return self.down(hidden) + x


def test_an_input_that_is_overwritten_is_noticed() -> None:
    _, twin = pair(Overwriting, 0.0)
    assert "does something between up and down that is not understood" in why_left(Overwriting, twin)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class WithFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Doubling.apply(self.act(self.up(x))))


class Peeking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        with torch.no_grad() if x.shape[0] == 3 else torch.inference_mode():
            self.largest = hidden.amax()
        return self.down(hidden)


@pytest.mark.parametrize("kind", [WithFunction, Peeking])
def test_no_gradient_is_lost_in_a_function_of_the_users(kind: type[Layer]) -> None:
    own, twin = pair(kind, 0.0)
    why_left(kind, twin)
    x = torch.randn(3, 6)
    assert_same(results(twin, x), results(own, x))
    with torch.no_grad():
        assert torch.equal(twin(x.repeat(2, 1)), own(x.repeat(2, 1)))


class Inherited(written(Layer, LEFT["scaled"][0])):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_method_of_a_base_class_is_not_read_through_super() -> None:
    layer, x = Inherited(), torch.randn(3, 6)
    expected = layer(x)
    why_left(Inherited, layer)
    assert torch.equal(layer(x), expected)


class ReturnsHidden(Layer):
    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.act(self.up(x))
        return {"hidden": [hidden], "y": self.down(hidden)}


def test_a_hidden_that_is_returned_is_a_tensor() -> None:
    own, twin = pair(ReturnsHidden, 0.0)
    assert "used for something else" in why_left(ReturnsHidden, twin)
    x = torch.randn(3, 6)
    torch.testing.assert_close(twin(x), own(x))


class Widened(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        with torch.autocast("cpu", enabled=False):
            return self.down(hidden.float())


def test_autocast_is_that_of_each_part() -> None:
    own, twin = pair(Widened, 0.0)
    why_left(Widened, twin)
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(results(twin, x), results(own, x))


class WithMethod(Layer):
    """Whose FFN is in a method that its forward calls."""

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


@pytest.mark.parametrize(
    "asks", ["type(self).__name__ == 'Written'", "self.__class__.__qualname__ != 'Fused'", "type(self) is self.kind"]
)
def test_a_method_that_calls_another_one_asks_for_its_class(asks: str) -> None:
    body = f"y = self.block(torch.as_tensor(x))\nif {asks}:\n    y = y.cumsum(-1)\nreturn y"
    kind = written(WithMethod, body)
    kind.kind = kind
    own, twin = pair(kind, 0.0)
    why_left(kind, twin)
    x = torch.randn(2, 3, 6)
    assert_same(results(twin, x), results(own, x))


def test_a_method_whose_caller_does_not_ask_for_its_class_is_fused() -> None:
    kind = written(WithMethod, "y = self.block(torch.as_tensor(x))\nreturn y.cumsum(-1) if type(x) is Tensor else y")
    own, twin = pair(kind, 0.0)
    assert not fl.replace(nn.ModuleList([twin, mlp()])).skipped
    x = torch.randn(2, 3, 6)
    assert_same(results(twin, x), results(own, x))


@pytest.mark.parametrize(
    "other", ["hidden * 2", "-hidden", "up", "torch.tanh(up)", "torch.dropout(hidden, 0.5, True)", "self.drop(hidden)"]
)
def test_a_method_that_gives_its_last_linear_another_hidden(other: str) -> None:
    """Of the same first linear: none of the two is the FFN of the other's input."""
    body = f"up = self.up(x)\nhidden = self.act(up)\nx = x + self.down(hidden)\nreturn x + self.down({other})"
    kind = written(Layer, body)
    own, twin = pair(kind, 0.0)
    why_left(kind, twin)
    x = torch.randn(2, 3, 6)
    torch.manual_seed(1)
    theirs = results(own, x)
    torch.manual_seed(1)
    assert_same(results(twin, x), theirs)


# Of which nothing is known behind them.
OVERWRITING = {
    "with": "with torch.enable_grad():\n    hidden = hidden * 2",
    "try": "try:\n    hidden = hidden * 2\nexcept ValueError:\n    pass",
    "for": "for _ in range(len(x)):\n    hidden = hidden * 2",
    "while": "while hidden.dim() < 3:\n    hidden = hidden.unsqueeze(0)",
}


@pytest.mark.parametrize("name", OVERWRITING)
@pytest.mark.parametrize("last", ["self.down(hidden)", "hidden.sum(-1, keepdim=True)"])
def test_a_method_that_overwrites_its_hidden_in_a_statement(name: str, last: str) -> None:
    """The variable must hold the hidden behind the FFN, too."""
    body = f"hidden = self.act(self.up(x))\nx = x + self.down(hidden)\n{OVERWRITING[name]}\nreturn x + {last}"
    kind = written(Layer, body)
    own, twin = pair(kind, 0.0)
    why_left(kind, twin)
    x = torch.randn(2, 3, 6)
    assert_same(results(twin, x), results(own, x))


def test_a_hidden_in_a_statement_that_nothing_reads_behind_it_is_fused() -> None:
    body = "for _ in range(len(x)):\n    hidden = self.act(self.up(x))\n    x = x + self.down(hidden)\nreturn x"
    own, twin = pair(written(Layer, body), 0.0)
    assert len(fl.replace(twin).replaced) == 1
    x = torch.randn(2, 3, 6)
    assert_same(results(twin, x), results(own, x))
