"""What blocks keep from call to call is never stale, stays out of copies and files, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fusedlayers import FusedFFN, replace, restore
from fusedlayers.modules import KEPT, FFNPieces, kept
from fusedlayers.replacing import FFNRule
from tests.support.ffn_blocks import GatedBlock, mlp, rule_for


class Doubled(nn.Module):
    """As LoRA does, a child that wraps a linear and adds to it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(6, 10), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class Outer(nn.Module):
    """A layer whose FFN lies in a child and in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.proj = Inner(), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.inner(x))


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 1, 10, dropout=0.0, batch_first=True).train()


INSIDE = FFNRule(
    Outer, up="inner.dense", activation="inner.act", down="proj", inside="forward", holders=(("inner", Inner),)
)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[FFNRule, ...], str, str]] = {
    # How to make it, the rules for it, and where its first linear and its activation are.
    "sequence": (lambda: mlp(p=0.0), (), "0", "1"),
    "gated": (GatedBlock, (rule_for(GatedBlock),), "fc", "act"),
    "layer": (layer, (), "linear1", ""),
    "inside": (
        Outer,
        (INSIDE,),
        "inner.dense",
        "inner.act",
    ),
    "module": (lambda: FusedFFN(6, 10), (), "up_proj", ""),
}  # fmt: skip


def input_of(model: nn.Module) -> Tensor:
    return torch.linspace(-1, 1, 24).view(2, 2, 6).to(next(model.parameters()).dtype)


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """What the model computes without this library."""
    if isinstance(model, FusedFFN):
        return model.down_proj(F.gelu(model.up_proj(x)))
    original = copy.deepcopy(model)
    restore(original)
    return original(x)


def called_once(name: str) -> nn.Module:
    torch.manual_seed(0)
    make, rules, _, _ = BLOCKS[name]
    model = make()
    if name != "module":
        replace(model, rules=rules)
    model(input_of(model))
    assert kept(model) is not None
    with torch.no_grad():
        # Tests compare without gradients: such calls are recalled from now on, too.
        model(input_of(model))
    return model


def up_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    holder, _, last = BLOCKS[name][2].rpartition(".")
    return model.get_submodule(holder), last


def set_up(model: nn.Module, name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    holder, last = up_of(model, name)
    setattr(holder, last, change(getattr(holder, last)))


def add_hook(linear: nn.Module) -> nn.Module:
    linear.register_forward_hook(lambda module, inputs, output: 3 * output)
    return linear


def add_pre_hook(linear: nn.Module) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return linear


def new_hooks(linear: nn.Module) -> nn.Module:
    """Another dictionary of hooks, as some put there to remove them all, and a hook in that."""
    linear._forward_hooks = type(linear._forward_hooks)()
    return add_hook(linear)


def own_forward(linear: nn.Module) -> nn.Module:
    linear.forward = lambda x: 4 * F.linear(x, linear.weight)  # type: ignore[method-assign]
    return linear


def tensor_in_place(linear: Any) -> nn.Module:
    """As a sharding library re-assigns a parameter between calls."""
    weight = linear.weight.detach() * 2
    del linear._parameters["weight"]
    linear.weight = weight
    return linear


def new_parameter(linear: Any) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.detach() * 2)
    return linear


def swapped_data(linear: Any) -> nn.Module:
    linear.weight.data = linear.weight.data * 2
    return linear


def without_bias(linear: Any) -> nn.Module:
    linear.bias = None
    return linear


def normed(linear: Any) -> nn.Module:
    weight_norm(linear)
    linear.parametrizations.weight.original0.data.mul_(2)
    return linear


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "forward hook": add_hook,
    "forward pre-hook": add_pre_hook,
    "hooks assigned": new_hooks,
    "wrapped": Doubled,
    "replaced": lambda linear: nn.Linear(6, 10),
    "parametrized": normed,
    "its own forward": own_forward,
    "tensor in place of the parameter": tensor_in_place,
    "new parameter": new_parameter,
    "swapped data": swapped_data,
    "without bias": without_bias,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_changed_linear_counts_at_the_next_call(name: str, change: str) -> None:
    model = called_once(name)
    x = input_of(model)
    with torch.no_grad():
        before = model(x)
        set_up(model, name, CHANGES[change])
        wanted = expected(model, x)
        torch.testing.assert_close(model(x), wanted)
    assert not torch.allclose(before, wanted, rtol=1e-3, atol=1e-3)


def test_a_removed_hook_fuses_again() -> None:
    model = called_once("sequence")
    hook = model[0].register_forward_hook(lambda module, inputs, output: output)  # type: ignore[index]
    model(input_of(model))
    assert kept(model) is None
    hook.remove()
    model(input_of(model))
    assert kept(model) is not None


@pytest.mark.parametrize("name", BLOCKS)
def test_a_global_hook_sees_the_children(name: str) -> None:
    model, seen = called_once(name), set()
    with nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.add(type(module))):
        model(input_of(model))
    assert nn.Linear in seen


@pytest.mark.parametrize("name", BLOCKS)
def test_a_patched_linear_class_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = called_once(name)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 5 * F.linear(x, self.weight))
    with torch.no_grad():
        torch.testing.assert_close(model(input_of(model)), expected(model, input_of(model)))


@pytest.mark.parametrize("name", [name for name in BLOCKS if BLOCKS[name][3]])
@pytest.mark.parametrize("change", ["option", "class", "hook"])
def test_a_changed_activation_counts(name: str, change: str) -> None:
    torch.manual_seed(0)
    make, rules, _, path = BLOCKS[name]
    model = make()
    holder, _, last = path.rpartition(".")
    setattr(model.get_submodule(holder), last, nn.GELU())
    replace(model, rules=rules)
    x = 4 * input_of(model)
    with torch.no_grad():
        for _ in range(2):
            before = model(x)
        assert kept(model) is not None
        if change == "option":
            model.get_submodule(path).approximate = "tanh"
        elif change == "class":
            setattr(model.get_submodule(holder), last, nn.ReLU())
        else:
            model.get_submodule(path).register_forward_hook(lambda module, inputs, output: -output)
        wanted = expected(model, x)
        torch.testing.assert_close(model(x), wanted, rtol=1e-6, atol=1e-7)
    assert not torch.equal(before, wanted)


def test_the_name_of_an_activation_counts() -> None:
    model = called_once("module")
    model.activation = "relu"
    x = input_of(model)
    torch.testing.assert_close(model(x), model.down_proj(F.relu(model.up_proj(x))))


@pytest.mark.parametrize("name", ["sequence", "gated", "layer", "module"])
def test_dropout_follows_training_and_p(name: str) -> None:
    model = called_once(name)
    set_p(model, 0.5)

    def found() -> list[float]:
        model(input_of(model))
        record = kept(model)
        runs = [record] if isinstance(record, FFNPieces) else [pieces for _, pieces in record if pieces is not None]
        return [pieces.dropout_p for pieces in runs]

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert found() == [0.5]
        model.eval()
        assert found() == [0.0]
        model.train()
        set_p(model, 0.25)
        assert found() == [0.25]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def set_p(model: nn.Module, p: float) -> None:
    if isinstance(model, FusedFFN):
        model.dropout = p
    elif isinstance(model, GatedBlock):
        model.p = p
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


def test_what_a_block_holds_besides_its_ffn_counts() -> None:
    model = called_once("gated")
    x = input_of(model)
    model.more = nn.Linear(6, 6)
    assert kept(model) is None
    model(x)
    assert kept(model) is None
    del model.more
    model(x)
    assert kept(model) is not None
    model.register_buffer("scale", torch.ones(1))
    assert kept(model) is None
    model._buffers.clear()
    model.norm = nn.Tanh()
    assert kept(model) is None


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("change", ["to", "half and back", "load_state_dict", "mixed"])
def test_other_parameters_count(name: str, change: str) -> None:
    model = called_once(name)
    if change == "to":
        model.to(torch.float64)
    elif change == "half and back":
        model.half()
        model.float()
    elif change == "load_state_dict":
        model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})
    else:
        set_up(model, name, lambda linear: linear.to(torch.bfloat16))
        with pytest.raises((RuntimeError, TypeError), match=r"dtype|same"):
            model(input_of(model).float())
        return
    x = input_of(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected(model, x))


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


def stored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("way", [copied, pickled, stored])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "inside"])
def test_copies_search_for_themselves(name: str, way: Callable[[nn.Module], nn.Module]) -> None:
    model = called_once(name)
    other = way(model)
    assert other.__dict__.get(KEPT) is None
    assert model.state_dict().keys() == other.state_dict().keys()
    assert not any("kept" in key for key in model.state_dict())
    x = input_of(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(other(x), expected(other, x))
        torch.testing.assert_close(model(x), expected(model, x))


def test_a_shallow_copy_shares_nothing_stale() -> None:
    model = called_once("gated")
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.fc = nn.Linear(6, 10)
    x = input_of(model)
    with torch.no_grad():
        torch.testing.assert_close(other(x), expected(other, x))
        torch.testing.assert_close(model(x), expected(model, x))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_replaced_child_is_freed_at_once(name: str) -> None:
    model = called_once(name)
    holder, last = up_of(model, name)
    old = weakref.ref(getattr(holder, last).weight)
    setattr(holder, last, nn.Linear(6, 10))
    gc.collect()
    assert old() is None


def test_restore_leaves_nothing_behind() -> None:
    model = called_once("sequence")
    restore(model)
    assert KEPT not in model.__dict__
    assert type(model) is nn.Sequential


def test_a_known_block_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [called_once(name) for name in BLOCKS]
    monkeypatch.setattr("fusedlayers.replacing.ffn.finding.linear_weight", None)
    monkeypatch.setattr("fusedlayers.modules.pieces.why_not_plain", None)
    for model in models:
        model(input_of(model))


def test_the_guard_costs_less_than_a_linear() -> None:
    model, linear, x = called_once("module"), nn.Linear(16, 16), torch.ones(2, 16)
    with torch.no_grad():
        # In turns, so that both have the machine's quiet moments.
        runs = (lambda: kept(model), lambda: linear(x))
        times = [[timeit.timeit(run, number=200) for run in runs] for _ in range(30)]
    guard, call = map(min, zip(*times, strict=True))
    assert guard < call
