"""What `replace` is told: classes by name, FFNs inside a longer method, linears that split their sums, recomputing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.functional import ffn
from fusedlayers.modules import class_path
from fusedlayers.replacing import FFNRule
from tests.support.ffn_blocks import (
    GatedBlock,
    LowRank,
    TaggedTensor,
    assert_same,
    count_fused_calls,
    mlp,
    pickled,
    results,
    rule_for,
    saved,
)
from tests.support.operands import patch_ffn

RULE = rule_for(GatedBlock)


class Layer(nn.Module):
    """A layer whose FFN is a part of its forward, with a residual and a norm; the dropout is a number."""

    def __init__(self, activation: object = None, p: float = 0.25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 10)
        self.act = nn.SiLU() if activation is None else activation
        self.p = p
        self.proj = nn.Linear(10, 6)
        self.seen = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = F.dropout(self.act(self.fc(self.norm(x))), self.p, self.training)
        self.seen = self.seen + 1
        return x + scale * self.proj(hidden.to(self.proj.weight.dtype))


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.fc(x)))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.proj(hidden) + x)


class SplitLayer(nn.Module):
    """A layer whose FFN lies in two children, called by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.into, self.out_of = nn.Linear(6, 6), Into(), OutOf()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(x=x + self.attention(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.out_of(self.into(x), x)


LAYER = FFNRule(Layer, up="fc", down="proj", activation="act", dropout="p", inside="forward")
SPLIT_LAYER = FFNRule(
    SplitLayer,
    up="into.fc",
    down="out_of.proj",
    activation="into.act",
    dropout="into.drop",
    inside="feed_forward",
    holders=(("into", Into), ("out_of", class_path(OutOf))),
)
# Layers with an FFN inside, and their rules.
INSIDE: dict[str, tuple[Callable[[], nn.Module], FFNRule]] = {
    "one method": (Layer, LAYER),
    "function": (lambda: Layer(F.gelu), LAYER),
    "two children": (SplitLayer, SPLIT_LAYER),
}
each_layer = pytest.mark.parametrize("layer", INSIDE)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


@each_layer
@pytest.mark.parametrize("training", [True, False])
def test_an_ffn_inside_a_method_is_fused(layer: str, training: bool, fused_calls: list[float]) -> None:
    build, rule = INSIDE[layer]
    model, x = build().train(training), torch.randn(2, 3, 6)
    theirs, keys, parts = results(model, x), list(model.state_dict()), [id(part) for part in model.modules()]
    [entry] = fl.replace(model, rules=[rule]).replaced
    assert entry.reason.endswith("6 -> 10 -> 6")
    assert_same(results(model, x), theirs)
    assert fused_calls == [0.25 if training else 0.0]
    assert (list(model.state_dict()), [id(part) for part in model.modules()]) == (keys, parts)
    for twin in (copy.deepcopy(model), pickled(model), saved(model)):
        assert type(twin) is type(model)
        assert_same(results(twin, x), theirs)
    assert len(fused_calls) == 4
    fl.restore(model)
    assert_same(results(model, x), theirs)
    assert len(fused_calls) == 4


@pytest.mark.parametrize("p", [0, 1])
def test_a_dropout_may_be_a_whole_number(p: int, fused_calls: list[float]) -> None:
    model, x = Layer(p=p), torch.randn(3, 6)
    theirs = model(x)
    if p == 0:
        fl.replace(model, rules=[LAYER])
    else:
        with pytest.warns(UserWarning, match=r"the dropout has p=1\.0, outside \[0, 1\)"):
            fl.replace(model, rules=[LAYER])
    assert torch.equal(model(x), theirs)
    assert len(fused_calls) == 1 - p


def test_the_method_runs_with_its_own_arguments_and_keeps_what_it_writes(fused_calls: list[float]) -> None:
    model, x = Layer(p=0.0), torch.randn(3, 6)
    theirs = model(x, scale=3.0)
    fl.replace(model, rules=[LAYER])
    assert torch.equal(model(x, scale=3.0), theirs)
    assert model.seen == 2
    assert "seen" in vars(model)
    assert fused_calls == [0.0]


@each_layer
def test_inside_a_method_tensors_that_are_not_plain_go_through_the_children(
    layer: str, fused_calls: list[float]
) -> None:
    build, rule = INSIDE[layer]
    model, x = build().eval(), torch.randn(3, 6).as_subclass(TaggedTensor)
    theirs = model(x)
    fl.replace(model, rules=[rule])
    assert torch.equal(model(x), theirs)
    assert not fused_calls


# What can happen to a layer with an FFN inside, and what the reason must say.
CHANGES: dict[str, tuple[Callable[[SplitLayer], object], str]] = {
    "hooked linear": (
        lambda m: m.into.fc.register_forward_hook(lambda _, __, y: 2 * y),
        "up linear has a forward hook",
    ),
    "hooked holder": (lambda m: m.into.register_forward_hook(lambda _, __, y: 2 * y), "its into has a forward hook"),
    "set forward": (lambda m: setattr(m.out_of, "forward", lambda h, x: x), "its out_of has a forward of its own"),
    "other holder": (lambda m: setattr(m, "into", nn.Linear(6, 10)), "up='into.fc' or down='out_of.proj' is no child"),
    "subclass of the holder": (lambda m: setattr(m, "into", ScaledInto()), "its into is a tests.replacing.test_rules."),
    "low rank": (lambda m: setattr(m.out_of, "proj", LowRank(m.out_of.proj)), "LowRank, not exactly nn.Linear"),
    "no activation": (lambda m: delattr(m.into, "act"), "the activation 'into.act' is not a known one"),
}


class ScaledInto(Into):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_that_are_not_as_the_rule_says_run_their_own_method(
    change: str, when: str, fused_calls: list[float]
) -> None:
    model, x = SplitLayer().eval(), torch.randn(3, 6)
    apply, reason = CHANGES[change]
    if when == "after":
        fl.replace(model, rules=[SPLIT_LAYER])
    apply(model)
    if when == "before":
        with pytest.warns(UserWarning, match="nothing was replaced"):
            [entry] = fl.replace(model, rules=[SPLIT_LAYER]).skipped[:1]
        assert reason in entry.reason
        assert type(model) is SplitLayer
        return
    assert reason in model.why_called()
    if change == "no activation":
        return
    ours = results(model, x)
    assert not fused_calls
    fl.restore(model)
    assert_same(ours, results(model, x))


def test_a_method_that_is_not_there_or_set_on_the_instance() -> None:
    model = Layer()
    with pytest.warns(UserWarning, match="has no method 'feed', which the rule names"):
        fl.replace(model, rules=[FFNRule(Layer, up="fc", down="proj", activation="act", dropout="p", inside="feed")])
    split = SplitLayer()
    split.feed_forward = split.feed_forward
    with pytest.warns(UserWarning, match="has a feed_forward of its own, set on the instance"):
        fl.replace(split, rules=[SPLIT_LAYER])


def test_a_class_may_be_named_by_where_it_is_imported_from(fused_calls: list[float]) -> None:
    model = nn.ModuleDict({"block": GatedBlock(), "other": GatedBlock(F.softplus)})
    rule = FFNRule(
        class_path(GatedBlock), up="fc", down="proj", gate="gate", activation="act", dropout="p", output_dropout="drop"
    )
    report = fl.replace(model, rules=[rule])
    assert [entry.path for entry in report.replaced] == ["block"]
    assert_same(results(pickled(model["block"]), torch.ones(3, 6)), results(model["block"], torch.ones(3, 6)))
    assert len(fused_calls) == 2
    fl.restore(model)
    assert type(model["block"]) is GatedBlock


def test_a_rule_of_the_user_comes_before_what_a_block_is_found_to_compute() -> None:
    assert fl.replace(GatedBlock()).replaced
    with pytest.warns(UserWarning, match="the block has a child 'gate' that the rule does not name"):
        fl.replace(GatedBlock(), rules=[FFNRule(GatedBlock, up="fc", down="proj")])


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute_reaches_the_function(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    patch_ffn(monkeypatch, lambda **given: seen.append(given["recompute"]) or ffn(**given))
    model = nn.Sequential(mlp(), GatedBlock(), Layer(), nn.TransformerEncoderLayer(6, 2, 10, 0.0))
    x = torch.randn(2, 3, 6)
    rules = [RULE, LAYER]
    report = fl.replace(model, rules=rules, recompute=recompute)
    assert len(report.replaced) == 4
    model(x).sum().backward()
    assert seen == [recompute] * 4
    for twin in (copy.deepcopy(model), pickled(model)):
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    again = fl.replace(model, rules=rules)
    assert {entry.reason for entry in again.skipped} == {
        f"already fused, with recompute={recompute}; restore it first to change that"
    }
    fl.restore(model)
    assert type(model[0]) is nn.Sequential
    assert type(model[3]) is nn.TransformerEncoderLayer


def test_saved_bytes_follow_recompute() -> None:
    """Per token: the input, the hidden, and what the slope of gelu needs, against the input alone; four bytes each."""
    model = nn.Sequential(mlp(), nn.ReLU(), mlp(nn.ReLU()))
    report = fl.replace(model, dry_run=True, recompute=True)
    assert [entry.saved_bytes for entry in report.replaced] == [(4 * (6 + 20), 4 * 6), (4 * (6 + 10), 4 * 6)]
    assert report.saved_bytes == (4 * 42, 4 * 12)
    assert "keeps 48 bytes a token for backward, torch 168" in str(report)
    assert "keeps 24 bytes a token for backward, torch 104" in str(report)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_weights_on_meta_and_frozen_weights_are_replaced(place: str, fused_calls: list[float]) -> None:
    model = mlp().to(place).requires_grad_(False)
    assert len(fl.replace(model).replaced) == 1
    y = model(torch.ones(3, 6, device=place, requires_grad=True))
    y.sum().backward()
    assert (y.device.type, fused_calls) == (place, [0.0])
    assert all(parameter.grad is None for parameter in model.parameters())
    model.to_empty(device="cpu")
    assert model(torch.ones(3, 6)).shape == (3, 6)


def test_a_model_on_several_devices(fused_calls: list[float]) -> None:
    apart = mlp()
    apart[2].to("meta")
    model = nn.ModuleList([mlp(), mlp().to("meta"), apart])
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["0", "1"]
    assert [entry.reason for entry in report.skipped] == ["0..2: the linears differ in dtype or device"]
    assert model[0](torch.ones(6)).device.type == "cpu"
    assert model[1](torch.ones(6, device="meta")).device.type == "meta"
    assert len(fused_calls) == 2


def test_linears_shared_by_blocks(fused_calls: list[float]) -> None:
    model = nn.Sequential(mlp(), mlp(nn.ReLU()))
    model[1][0], model[1][2].weight = model[0][0], model[0][2].weight
    x = torch.randn(3, 6)
    theirs = results(model, x)
    assert len(fl.replace(model).replaced) == 2
    assert_same(results(model, x), theirs)
    assert model[1][0] is model[0][0]
    assert model[1][2].weight is model[0][2].weight
    assert len(fused_calls) == 2


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            lambda: fl.replace(mlp(), recompute="no"),
            ValueError,
            "recompute must be \"auto\", True, False or an int of bytes above 1, got 'no'",
        ),
        (
            lambda: FFNRule("GatedBlock", up="fc", down="proj"),
            TypeError,
            "module_class must be a subclass of nn.Module",
        ),
        (
            lambda: FFNRule(Layer, up="fc", down="proj", gate_rows="odd", inside="forward"),
            ValueError,
            "excludes even and odd gate_rows",
        ),
        (lambda: FFNRule(Layer, up="fc", down="proj", gate_rows="upper"), ValueError, "gate_rows must be one of"),
        (lambda: FFNRule(Layer, up="fc", down="proj", gate="g", gate_rows="odd"), ValueError, "and excludes gate"),
        (lambda: FFNRule(Layer, up="a.fc", down="proj"), ValueError, r"holders must name the class of each of \['a'\]"),
        (
            lambda: FFNRule(Layer, up="a.fc", down="proj", inside="forward", holders=(("a", 3),)),
            TypeError,
            "holders: the class of a must be a subclass of nn.Module",
        ),
        (
            lambda: fl.replace(mlp(), rules=[RULE, FFNRule(class_path(nn.Sequential), up="0", down="2")]),
            ValueError,
            "no rule",
        ),
    ],
)
def test_bad_rules(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()
