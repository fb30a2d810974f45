"""Linears become `SplitKLinear` where a rule of the user says so, and stay the linears that they were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.replacing import LinearRule
from fusedlayers.replacing.linears import FusedSplitKLinear
from tests.support.ffn_blocks import LowRank, TaggedTensor, assert_same, mlp, pickled, results, saved


def _model() -> nn.ModuleDict:
    return nn.ModuleDict({"ffn": mlp(), "head": nn.Linear(6, 61), "side": nn.Linear(6, 3, bias=False)})


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        (LinearRule(), ["head", "side"]),
        (LinearRule(names="he*"), ["head"]),
        (LinearRule(names=("x.*", "*.side", "side")), ["side"]),
        (LinearRule(in_features=6, out_features=range(50, 70)), ["head"]),
        (LinearRule(out_features=4), []),
        (LinearRule(predicate=lambda path, linear: linear.bias is None), ["side"]),
        (LinearRule(names="ffn.*"), []),
    ],
)
def test_linears_become_split_k_by_rule(rule: LinearRule, taken: list[str]) -> None:
    model = _model()
    report = fl.replace(model, rules=[rule])
    assert [entry.path for entry in report.replaced] == ["ffn", *taken]
    assert [type(model[name]) is nn.Linear for name in ("head", "side")] == [
        name not in taken for name in ("head", "side")
    ]
    assert all(isinstance(model[name], fl.SplitKLinear) for name in taken)
    assert not any(isinstance(part, fl.SplitKLinear) for part in model["ffn"])
    idle = [entry.reason for entry in report.skipped if entry.path == "(rules)"]
    assert idle == ([f"no linear meets the conditions of {rule}"] if rule.out_features == 4 else [])


def test_a_split_k_linear_is_the_linear_it_was() -> None:
    model, x = _model(), torch.randn(4, 6)
    head, weight = model["head"], model["head"].weight
    theirs = results(head, x)
    rule = LinearRule(names="head")
    report = fl.replace(model, rules=[rule])
    assert report.replaced[1].reason == "split_k='auto', workspace, 6 -> 61"
    assert (model["head"], model["head"].weight) == (head, weight)
    assert_same(results(head, x), theirs)
    for twin in (copy.deepcopy(head), saved(head)):
        assert type(twin) is type(head)
        assert_same(results(twin, x), theirs)
    again = {entry.path: entry.reason for entry in fl.replace(model, rules=[rule]).skipped}
    assert again["head"] == "already fused"
    fired: list[int] = []
    head.register_forward_hook(lambda *_: fired.append(1))
    assert_same(results(head, x), theirs)
    assert fired == [1]
    fl.restore(model)
    assert type(head) is nn.Linear
    assert "split_k" not in vars(head)


def test_the_options_of_a_linear_rule_reach_the_linear() -> None:
    model = _model()
    report = fl.replace(model, rules=[LinearRule(names="head", split_k=2, reduction="atomic"), LinearRule()])
    assert [entry.reason for entry in report.replaced[1:]] == [
        "split_k=2, atomic, 6 -> 61",
        "split_k='auto', workspace, 6 -> 3",
    ]
    for head in (model["head"], pickled(model)["head"]):
        assert (head.split_k, head.reduction) == (2, "atomic")
        assert not {"split_k", "reduction"} & vars(head).keys()
        assert {"split_k": 2, "reduction": "atomic"}.items() <= head.call_arguments(torch.ones(6)).items()


def test_linears_that_are_left() -> None:
    model = nn.ModuleDict({"ffn": mlp(), "hooked": nn.Linear(6, 6), "tagged": nn.Linear(6, 6), "low": nn.Linear(6, 6)})
    model["hooked"].register_forward_hook(lambda *_: None)
    model["tagged"].weight = nn.Parameter(model["tagged"].weight.detach().as_subclass(TaggedTensor))
    model["low"] = LowRank(model["low"])
    left = {
        entry.path: entry.reason for entry in fl.replace(model, rules=[LinearRule(out_features=range(3, 99))]).skipped
    }
    assert left["ffn.0"] == left["ffn.2"] == "is part of a fused FFN"
    assert left["hooked"] == "has a forward hook"
    assert "TaggedTensor, not a plain tensor" in left["tagged"]
    assert isinstance(model["low"].base, FusedSplitKLinear)
    only = nn.ModuleList([nn.Linear(6, 6)])
    assert fl.replace(only, rules=[LinearRule()], strict=True).replaced


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: LinearRule(names=3), TypeError, "names must be a str, a tuple of str or None, got 3"),
        (lambda: LinearRule(in_features="6"), TypeError, "in_features must be an int, a range or None"),
        (lambda: LinearRule(out_features=True), TypeError, "out_features must be an int, a range or None"),
        (lambda: LinearRule(predicate="head"), TypeError, "predicate must be callable or None"),
        (lambda: LinearRule(split_k=0), ValueError, "split_k"),
        (lambda: LinearRule(reduction="tree"), ValueError, "reduction"),
    ],
)
def test_bad_rules(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()
