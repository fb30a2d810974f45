"""FFNs inside a method that uses their parts otherwise than a rule says: nothing is lost, and the reason is said."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing import FFNRule
from tests.support.ffn_blocks import assert_same, count_fused_calls, results, seeded_dropout


class Layer(nn.Module):
    """What all of these have; each writes its method anew."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.attention, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.act, self.drop, self.norm = nn.SiLU(), nn.Dropout(p), nn.LayerNorm(10)
        self.p = p


class DropoutForAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(x))
        return x + self.drop(self.down(self.drop(self.act(self.up(x)))))


class NumberForAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(x), self.p, self.training)
        hidden = F.dropout(self.act(self.up(x)), p=self.p, training=self.training)
        return F.dropout(self.down(hidden), self.p, self.training)


class NumberReadFirst(Layer):
    def forward(self, x: Tensor) -> Tensor:
        p, training = self.p, self.training
        return self.down(F.dropout(input=self.act(self.up(x)), p=p, training=training))


class ActivationForAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.down(self.act(self.up(self.act(x)))))


class ActivatedTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.act(self.up(x))))


class DroppedTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.drop(self.act(self.up(x)))))


class DroppedFirst(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.drop(self.up(x))))


class NotActivated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * 0.5)


class ScaledBefore(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(0.5 * self.up(x)))


class Normed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.up(x))))


class UpTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * self.up(x + 1))


class TwoFFNs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.up(x))
        return self.down(self.act(self.up(x + 1))) + self.down(first)


class Tied(Layer):
    """The down linear is none of the FFN's alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) + self.down(x.repeat_interleave(2, -1)[..., :10])


class HiddenKept(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.act(self.up(x))
        return self.down(self.seen)


class HiddenInResult(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        return {"y": [self.down(hidden), hidden]}["y"][0] + hidden.mean()


class InPlace(Layer):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__(p)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.act(hidden)
        F.dropout(hidden, self.p, self.training, inplace=True)
        return self.down(hidden)


class ByName(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=self.act(input=self.up(input=x)))


class WithoutGradient(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.up(x)
        return self.down(self.act(hidden)) + x


# How often the FFN is still computed in one piece, and what the reason must hold.
FUSED: dict[type[Layer], tuple[int, str | None]] = {
    DropoutForAll: (1, None),
    NumberForAll: (1, None),
    NumberReadFirst: (1, None),
    ActivationForAll: (1, None),
    InPlace: (1, None),
    TwoFFNs: (2, None),
    Tied: (1, None),
    ActivatedTwice: (0, "in an activation that is not the one after the up linear"),
    DroppedTwice: (0, "in a dropout that is not the one after the activation"),
    DroppedFirst: (0, "in a dropout that is not the one after the activation"),
    NotActivated: (0, "in the down linear"),
    Scaled: (0, "in __mul__"),
    ScaledBefore: (0, "in __rmul__"),
    Normed: (0, "in layer_norm"),
    UpTwice: (0, "in __mul__"),
    HiddenKept: (0, "kept as seen"),
    HiddenInResult: (1, "its mean"),
    ByName: (1, None),
    WithoutGradient: (0, "in an activation that is not the one after the up linear"),
}
each_kind = pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


def rule(kind: type[Layer]) -> FFNRule:
    dropout = "p" if kind in (NumberForAll, NumberReadFirst, InPlace) else "drop"
    return FFNRule(kind, up="up", down="down", activation="act", dropout=dropout, inside="forward", trusted=True)


def replaced(kind: type[Layer], p: float) -> tuple[Layer, Layer]:
    """A layer as it was, and its replaced copy."""
    torch.manual_seed(0)
    own = kind(p)
    twin = copy.deepcopy(own)
    assert fl.replace(twin, rules=[rule(kind)]).replaced
    return own, twin


@each_kind
@pytest.mark.parametrize("training", [True, False])
def test_results_and_gradients_are_the_methods_own(
    kind: type[Layer], training: bool, fused_calls: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Masks are drawn one after the other, as the method does: none is lost, and none drawn twice."""
    own, twin = replaced(kind, 0.25)
    x = torch.randn(2, 3, 6)
    with caplog.at_level(logging.INFO, "fusedlayers"):
        ours = results(twin.train(training), x)
    theirs = results(own.train(training), x)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], msg=lambda text, name=name: f"{name}: {text}")
    count, reason = FUSED[kind]
    assert training is False or len(fused_calls) == count
    if training and reason is not None:
        expected = "the method uses the hidden otherwise than its rule says"
        for said in (
            caplog.text,
            fl.explain(twin, x, details=True),
            fl.replace(nn.ModuleList([twin])).skipped[0].reason,
        ):
            assert f"{expected} ({reason})" in said


@pytest.mark.parametrize("kind", [DropoutForAll, NumberForAll])
def test_every_dropout_drops(kind: type[Layer]) -> None:
    """Of what p = 0.9 drops everywhere: ones stay 0.1 of the time after each dropout."""
    _, twin = replaced(kind, 0.9)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.attention.bias.fill_(1.0)
        twin.down.bias.fill_(1.0)
    y = twin(torch.zeros(2000, 6))
    if kind is NumberForAll:
        assert 0.05 < (y != 0).float().mean() < 0.15
    else:
        assert 0.14 < (y != 0).float().mean() < 0.24


@pytest.mark.parametrize("kind", [DropoutForAll, NumberForAll, Scaled, UpTwice, ActivatedTwice, HiddenInResult])
def test_compiled(kind: type[Layer]) -> None:
    own, twin = replaced(kind, 0.0)
    torch._dynamo.reset()
    x = torch.randn(4, 6)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    # Dynamo lists torch's functions once in a process, as they are then; `results` puts another dropout there.
    compiled(x)
    theirs = results(own, x)
    for name, tensor in results(twin, x, call=lambda *inputs: compiled(*inputs)).items():
        torch.testing.assert_close(tensor, theirs[name])


class DroppedAndKept(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.act(self.up(x)))
        return self.down(hidden) + hidden.sum()


def test_a_hidden_with_another_mask_is_never_given(fused_calls: list[float]) -> None:
    _, twin = replaced(DroppedAndKept, 0.25)
    with pytest.raises(
        RuntimeError, match=r"the hidden was dropped out inside of the FFN and is used again \(its sum\)"
    ):
        twin(torch.randn(3, 6))
    twin.eval()(torch.randn(3, 6))
    assert fused_calls == [0.25, 0.0]


class Overwriting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        x.add_(1)
        return self.down(hidden) + x


def test_an_input_that_is_overwritten_is_refused() -> None:
    _, twin = replaced(Overwriting, 0.0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="writes into the input of the FFN before"):
        twin(torch.randn(3, 6))
    with torch.inference_mode():
        assert replaced(DropoutForAll, 0.0)[1](torch.randn(3, 6)).shape == (3, 6)


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


def test_no_gradient_is_lost_in_a_function_of_the_users() -> None:
    _, twin = replaced(WithFunction, 0.0)
    with pytest.raises(RuntimeError, match=r"a torch\.autograd\.Function was given the hidden"):
        twin(torch.randn(3, 6))
    own, twin = replaced(Peeking, 0.0)
    x = torch.randn(3, 6)
    assert_same(results(twin, x), results(own, x))
    with torch.no_grad():
        assert torch.equal(twin(x.repeat(2, 1)), own(x.repeat(2, 1)))


class Inherited(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_method_that_uses_super_is_left() -> None:
    layer, x = Inherited(), torch.randn(3, 6)
    expected = layer(x)
    with pytest.warns(UserWarning, match=r"its forward uses super\(\), which the stand-in"):
        fl.replace(layer, rules=[rule(Inherited)])
    assert torch.equal(layer(x), expected)


class ReturnsHidden(Layer):
    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.act(self.up(x))
        return {"hidden": [hidden], "y": self.down(hidden)}


def test_a_hidden_that_is_returned_is_a_tensor() -> None:
    own, twin = replaced(ReturnsHidden, 0.0)
    x = torch.randn(3, 6)
    theirs, ours = own(x), twin(x)
    assert type(ours["hidden"][0]) is Tensor
    torch.testing.assert_close(ours, theirs)


def test_autocast_is_that_of_each_part() -> None:
    class Widened(Layer):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.act(self.up(x))
            with torch.autocast("cpu", enabled=False):
                return self.down(hidden.float())

    own, twin = replaced(Widened, 0.0)
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(results(twin, x), results(own, x))


def test_xlnet_in_training() -> None:
    """One dropout serves the hidden and the result."""
    modeling = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = modeling.XLNetConfig(vocab_size=31, d_model=12, n_layer=2, n_head=2, d_inner=20, dropout=0.0)
    inside = FFNRule(
        modeling.XLNetFeedForward, up="layer_1", down="layer_2", activation="activation_function", dropout="dropout",
        inside="forward",
    )  # fmt: skip
    torch.manual_seed(0)
    own = modeling.XLNetModel(config).train()
    twin = copy.deepcopy(own)
    assert len(fl.replace(twin, rules=[inside]).replaced) == 2
    tokens = torch.randint(31, (2, 7))
    for p in (0.0, 0.5):
        gradients = []
        for model in (own, twin):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = p
            model.zero_grad()
            torch.manual_seed(1)
            with seeded_dropout():
                model(tokens).last_hidden_state.square().mean().backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(*gradients)
