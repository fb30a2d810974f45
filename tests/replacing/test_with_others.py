"""What other tools do to the modules that `replace` changes: patched methods, kept methods, vectors, signatures."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing import FFNRule, LinearRule
from tests.support.ffn_blocks import BLOCKS, GatedBlock, assert_same, count_fused_calls, encoder, mlp, results, rule_for

RULES = (rule_for(GatedBlock), LinearRule(names="head"))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


def keep_forward(module: nn.Module) -> None:
    """What accelerate's hooks do: another forward on the instance, which calls the one that it found."""

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.found_forward(*args, **kwargs)

    module.found_forward = module.forward
    module.forward = MethodType(hooked, module)  # type: ignore[method-assign]


@pytest.mark.parametrize("block", [*BLOCKS, "linear"])
def test_a_forward_that_somebody_kept_is_the_restored_modules_own(block: str) -> None:
    torch.manual_seed(0)
    if block == "linear":
        model, x = nn.ModuleDict({"head": nn.Linear(6, 5)}), torch.randn(3, 6)
        module = model["head"]
    else:
        module, x = BLOCKS[block][0](), torch.randn(2, 3, 6)
        model = nn.ModuleList([module])
    model.eval()
    expected = module(x)
    fl.replace(model, rules=RULES)
    keep_forward(module)
    assert torch.equal(module(x), expected)
    fl.restore(model)
    assert torch.equal(module(x), expected)


def test_verify_compares_a_block_whose_forward_was_kept() -> None:
    model = mlp()
    fl.replace(model)
    keep_forward(model)
    assert fl.verify(model, torch.randn(3, model[0].in_features)).ok


@pytest.mark.parametrize("kind", [nn.Sequential, nn.TransformerEncoderLayer])
def test_a_patched_class_is_left_alone(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    own: Callable[..., Tensor] = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 2 * own(self, *args, **kwargs))
    model = mlp() if kind is nn.Sequential else encoder("relu", True, True)
    with pytest.warns(UserWarning, match=r"has another forward than its class was written with: .*<lambda>"):
        fl.replace(model)


def test_linears_of_a_patched_class_are_called(fused_calls: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = mlp(), nn.Linear.forward
    fl.replace(model)
    x = torch.randn(3, model[0].in_features)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: 2 * own(self, input))
    patched = model(x)
    assert not fused_calls
    fl.restore(model)
    assert torch.equal(patched, model(x))


class Norm(nn.Module):
    """A block whose FFN is inside its method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Activation(nn.Module):
    """With a child that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Gate(nn.Module):
    """The first half of a gated FFN."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(6, 10), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


INSIDE_RULE = FFNRule(Norm, up="up", down="down", activation="act", inside="forward")

# A block, the class that is patched after replace, and its method.
PATCHED: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], str]] = {
    "sequential": (mlp, nn.Sequential, "forward"),
    "encoder": (lambda: encoder("relu", True, True), nn.TransformerEncoderLayer, "_ff_block"),
    "encoder's forward": (lambda: encoder("relu", True, True), nn.TransformerEncoderLayer, "forward"),
    "whole block": (GatedBlock, GatedBlock, "forward"),
    "inside": (Norm, Norm, "forward"),
    "activation": (mlp, nn.GELU, "forward"),
    "activation inside": (Norm, nn.GELU, "forward"),
    "activation with a child": (lambda: mlp(Activation()), Activation, "forward"),
    "child of an activation": (lambda: mlp(Activation()), nn.GELU, "forward"),
    "GLU": (lambda: nn.Sequential(nn.Linear(6, 20), nn.GLU(), nn.Linear(10, 6)), nn.GLU, "forward"),
    "gate": (lambda: nn.Sequential(Gate(), nn.Linear(10, 6)), Gate, "forward"),
    "dropout": (lambda: mlp(p=0.5), nn.Dropout, "forward"),
    "linear": (mlp, nn.Linear, "forward"),
    "split-k linear": (lambda: nn.ModuleDict({"head": nn.Linear(6, 5)}), nn.Linear, "forward"),
}


@pytest.mark.parametrize("name", PATCHED)
def test_a_class_that_is_patched_after_replace_runs_as_it_is_now(
    name: str, fused_calls: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build, kind, method = PATCHED[name]
    monkeypatch.setattr("fusedlayers.modules.children._said", set())
    model, x = nn.ModuleList([build()]), torch.randn(2, 3, 6)
    fl.replace(model, rules=[rule_for(GatedBlock), INSIDE_RULE, LinearRule(names="*head")])
    block = model[0]["head"] if name == "split-k linear" else model[0]
    before, classes = block.eval()(x), [type(module) for module in model.modules()]
    count, own = len(fused_calls), getattr(kind, method)
    twin = copy.deepcopy(block)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "fusedlayers"):

        def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return 2 * own(self, *args, **kwargs)

        patch.setattr(kind, method, patched)
        ours = results(block, x)
        # encoder's forward is the patched one anyway, with the FFN inside.
        assert len(fused_calls) == count + (name == "encoder's forward")
        assert torch.equal(ours["y"], copy.deepcopy(block)(x))
        assert torch.equal(ours["y"], twin(x))
        if name != "encoder's forward":
            assert len(caplog.records) == 1
            assert "forward" in caplog.text or "_ff_block" in caplog.text
            assert "forward" in fl.explain(block, x, details=True) or "_ff_block" in fl.explain(block, x, details=True)
        if name in ("whole block", "inside", "sequential"):
            skipped = fl.replace(model, rules=[INSIDE_RULE, rule_for(GatedBlock)]).skipped
            assert f"the {method} of {kind.__name__} was changed after replace" in skipped[0].reason
        fl.restore(model)
        assert type(block) is type(build()) or name == "split-k linear"
        assert_same(results(block, x), ours)
        for module, fused in zip(model.modules(), classes, strict=True):
            module.__class__ = fused
    count = len(fused_calls)
    assert torch.equal(block(x), before)
    assert name == "split-k linear" or len(fused_calls) == count + 1


def test_a_rule_of_the_user_is_believed_of_a_class_that_was_patched_before(
    fused_calls: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, x = GatedBlock(), GatedBlock(), torch.randn(3, 6)
    trusted = dataclasses.replace(RULES[0], trusted=True)
    fl.replace(first, rules=[trusted])
    own = GatedBlock.forward
    monkeypatch.setattr(GatedBlock, "forward", lambda self, x: own(self, x))
    fl.replace(second, rules=[trusted])
    first(x)
    assert not fused_calls
    second(x)
    copy.deepcopy(second)(x)
    assert len(fused_calls) == 2


def test_a_compiled_block_runs_the_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for block, rule in ((GatedBlock(), rule_for(GatedBlock)), (Norm(), INSIDE_RULE), (mlp(), None)):
        x = torch.randn(3, 6)
        fl.replace(block, rules=[] if rule is None else [rule])
        kind, own = block.fused_from, block.fused_from.forward
        torch._dynamo.reset()
        compiled = torch.compile(block.eval(), backend="eager", fullgraph=True)
        before = compiled(x)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x, own=own: 2 * own(self, x))
            # The graph that was compiled before does not serve any more.
            torch.testing.assert_close(compiled(x), 2 * before)
            torch._dynamo.reset()
            y = compiled(x)
            torch.testing.assert_close(y, block(x))
            fl.restore(block)
            torch.testing.assert_close(y, block(x))


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("size", [0, 24])
def test_weights_that_are_vectors_between_calls_are_left(position: int, size: int) -> None:
    """FSDP's first version shards them so, and DeepSpeed empties them."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    model[position].weight = nn.Parameter(torch.empty(size))
    role = "down" if position else "up"
    reason = f"has a weight of shape [{size}]"
    with pytest.warns(UserWarning, match="nothing was replaced"):
        assert fl.replace(model).skipped[0].reason == f"0..2: the {role} linear {reason}"
    report = fl.replace(model, rules=[LinearRule()])
    assert [entry.path for entry in report.replaced] == [str(2 - position)]
    assert report.skipped[-1].reason == reason


def test_a_bias_that_is_one_number_is_torchs_to_add(fused_calls: list[float]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), torch.randn(3, 4)
    fl.replace(model)
    model[2].bias = nn.Parameter(torch.ones(1))
    y = model(x)
    assert not fused_calls
    fl.restore(model)
    assert torch.equal(y, model(x))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_replaced_linear_takes_nested_tensors(layout: torch.layout) -> None:
    linear, parts = nn.Linear(8, 6), [torch.randn(3, 8), torch.randn(5, 8)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    expected = linear(x).unbind()
    fl.replace(linear, rules=[LinearRule()])
    assert len(expected) == len(parts)
    assert all(map(torch.equal, linear(x).unbind(), expected))


class Block(nn.Module):
    """A block of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens."""
        return self.down(self.act(self.up(tokens)))


BLOCK_RULE = FFNRule(Block, up="up", down="down", activation="act")


def test_a_block_of_the_users_keeps_its_signature(fused_calls: list[float]) -> None:
    model, x = Block(), torch.randn(3, 8)
    signature, expected = inspect.signature(model.forward), results(model, x)
    fl.replace(model, rules=[BLOCK_RULE])
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(tokens=x), model(x))
    assert len(fused_calls) == 2
    assert_same(results(model, x), expected)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'x'"):
        model(x=x)
    assert "d tokens" in [verdict.name for verdict in fl.verify(model, tokens=x.requires_grad_()).verdicts]
    exported = torch.export.export(model, (x,), dynamic_shapes={"tokens": {0: torch.export.Dim("rows", min=2)}})
    longer = torch.randn(7, 8)
    assert torch.equal(exported.module()(longer), model(longer))


def test_torch_fx_traces_a_replaced_linear_and_a_users_block() -> None:
    x = torch.randn(3, 8)
    for model, rule in ((nn.Sequential(nn.Linear(8, 8)), LinearRule()), (Block(), BLOCK_RULE)):
        fl.replace(model, rules=[rule])
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


class NoSubclasses(type):
    """Refuses them."""

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> NoSubclasses:
        if any(isinstance(base, NoSubclasses) for base in bases):
            raise RuntimeError("this class is the last one")
        return super().__new__(cls, name, bases, names)


def test_a_class_that_cannot_be_derived_from_is_left_and_the_others_are_not() -> None:
    last = NoSubclasses("Last", (Block,), {})
    model = nn.ModuleList([last(), Block()])
    report = fl.replace(model, rules=[BLOCK_RULE, FFNRule(last, up="up", down="down", activation="act")])
    assert [entry.path for entry in report.replaced] == ["1"]
    assert [entry.reason for entry in report.skipped] == [
        "no class can be derived from its own: this class is the last one"
    ]


@pytest.mark.parametrize(
    "holders", [None, [], {"output": Block}, ("output", Block), (("output",),), ((1, Block),)], ids=str
)
def test_holders_are_pairs(holders: Any) -> None:
    with pytest.raises(TypeError, match=r"holders must be a tuple of pairs \(name of a child, its class\), got"):
        FFNRule(Block, up="output.up", down="down", activation="act", inside="forward", holders=holders)


def test_a_class_and_its_path_are_one_class() -> None:
    path = FFNRule(f"{__name__}.Block", up="up", down="down", activation="act")
    for rules in ([path, BLOCK_RULE], [BLOCK_RULE, path], [path, path]):
        with pytest.raises(ValueError, match="Block needs no rule, or has one already"):
            fl.replace(Block(), rules=rules)


def test_explain_takes_the_arguments_of_a_module_by_name() -> None:
    ffn, x = fl.FusedFFN(8, 16), torch.randn(3, 8)
    assert fl.explain(ffn, x=x, details=True) == fl.explain(ffn, x, details=True)
    with pytest.raises(TypeError, match=r"residual .*expected the dtype of x"):
        fl.explain(ffn, x, residual=x.double())
    with pytest.raises(TypeError, match="nonsense"):
        fl.explain(ffn, x, nonsense=3)


def test_verify_needs_numbers() -> None:
    with pytest.raises(ValueError, match="target: FusedFFN or an input is on the meta device"):
        fl.verify(fl.FusedFFN(8, 16, device="meta"), torch.randn(3, 8, device="meta"))
