"""`replace` changes who computes an FFN and nothing else, and `restore` undoes it."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from tests.support.ffn_blocks import (
    BLOCKS,
    Decoder,
    Doubled,
    GatedBlock,
    LowRank,
    Scale,
    TaggedTensor,
    assert_same,
    count_fused_calls,
    encoder,
    mlp,
    pickled,
    results,
    rule_for,
    saved,
)

RULE = rule_for(GatedBlock)
each_block = pytest.mark.parametrize("block", BLOCKS)


def replaced(model: nn.Module) -> fl.replacing.Report:
    return fl.replace(model, rules=(RULE,))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


@each_block
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_the_same(block: str, training: bool, fused_calls: list[float]) -> None:
    """On the CPU the same torch operations run in the same order, so everything is equal bit for bit."""
    build, count = BLOCKS[block]
    model = build().train(training)
    x = torch.randn(2, 3, 6)
    theirs = results(model, x)
    assert len(replaced(model).replaced) == count
    assert_same(results(model, x), theirs)
    assert len(fused_calls) == count
    fl.restore(model)
    assert_same(results(model, x), theirs)
    assert len(fused_calls) == count


@pytest.mark.interpreter
def test_the_kernels_compute_it_within_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    x = torch.randn(40, 32)
    truth = results(copy.deepcopy(model).double(), x.double())
    theirs = results(model, x)
    fl.replace(model)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert_all_close(results(model, x), theirs, truth)


def state(model: nn.Module) -> list[object]:
    """Everything about a module that must not change, by identity."""
    found: list[object] = []
    for name, module in model.named_modules(remove_duplicate=False):
        found += [name, id(module), module.training, *vars(module)]
        found += [
            (key, id(hook)) for hooks in (module._forward_hooks, module._backward_hooks) for key, hook in hooks.items()
        ]
    found += [(name, id(tensor), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()]
    return found


@each_block
def test_nothing_else_changes(block: str) -> None:
    model = BLOCKS[block][0]()
    fired: list[str] = []
    for module in model.modules():
        if list(module.children()):
            module.register_forward_hook(lambda *_: fired.append("forward"))
    classes, before = [type(module) for module in model.modules()], state(model)
    fl.replace(model, rules=(RULE,), dry_run=True)
    assert [type(module) for module in model.modules()] == classes
    replaced(model)
    assert state(model) == before
    assert [type(module) for module in model.modules()] != classes
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), classes, strict=True))
    model(torch.randn(2, 3, 6))
    hooked = sum(bool(module._forward_hooks) for module in model.modules())
    assert len(fired) == hooked
    fl.restore(model)
    assert state(model) == before
    assert [type(module) for module in model.modules()] == classes


@each_block
def test_a_second_replace_finds_nothing_new(block: str) -> None:
    model = BLOCKS[block][0]()
    replaced(model)
    classes = [type(module) for module in model.modules()]
    again = replaced(model)
    assert again.replaced == ()
    assert "already fused" in {entry.reason for entry in again.skipped}
    assert [type(module) for module in model.modules()] == classes
    assert fl.replace(fl.FusedFFN(6, 10), strict=True).skipped[0].reason == "already fused"


@each_block
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
def test_copies_are_fused_and_can_be_restored(
    block: str, copied: Callable[[nn.Module], nn.Module], fused_calls: list[float]
) -> None:
    model = BLOCKS[block][0]()
    x = torch.randn(2, 3, 6)
    theirs = results(model, x)
    replaced(model)
    twin = copied(model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert_same(results(twin, x), theirs)
    assert len(fused_calls) == BLOCKS[block][1]
    fl.restore(twin)
    assert_same(results(twin, x), theirs)
    assert len(fused_calls) == BLOCKS[block][1]


def test_a_copy_keeps_a_shared_block_shared() -> None:
    block = GatedBlock()
    model = nn.Sequential(block, nn.ReLU(), block)
    report = replaced(model)
    assert [entry.path for entry in report.replaced] == ["0"]
    twin = copy.deepcopy(model)
    assert twin[0] is twin[2]
    assert type(twin[0]) is type(block)


def test_tied_weights_stay_tied(fused_calls: list[float]) -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(10, 6), ffn=mlp(), head=nn.Linear(6, 10)))
    model.head.weight = model.embed.weight
    tokens = torch.arange(10)
    theirs = model(tokens)
    fl.replace(model)
    assert torch.equal(model(tokens), theirs)
    assert model.head.weight is model.embed.weight
    model.load_state_dict(copy.deepcopy(model).state_dict(), strict=True)
    assert fused_calls


def test_dropout_follows_the_modules_at_every_call(fused_calls: list[float]) -> None:
    model = mlp(p=0.25)
    fl.replace(model)
    x = torch.randn(3, 6)
    model(x)
    model[2].p = 0.75
    model(x)
    model.eval()
    model(x)
    model[2].train()
    model(x)
    assert fused_calls == [0.25, 0.75, 0.0, 0.75]
    model[2].p = 1.0
    assert torch.equal(model(x), model[3].bias.expand(3, 6))
    assert len(fused_calls) == 4


def _tag(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(TaggedTensor))


# What can happen to the children of `mlp(p=0.25)`, and what the reason must say.
CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "hooked up": (lambda m: m[0].register_forward_hook(lambda _, __, y: 2 * y), "the up linear has a forward hook"),
    "hooked down": (
        lambda m: m[3].register_full_backward_hook(lambda _, dx, __: (2 * dx[0],)),
        "the down linear has a backward hook",
    ),
    "hooked activation": (lambda m: m[1].register_forward_hook(lambda _, __, y: 2 * y), "the activation has a forward"),
    "hooked dropout": (lambda m: m[2].register_forward_pre_hook(lambda _, x: (2 * x[0],)), "the dropout has a forward"),
    "parametrized": (lambda m: parametrize.register_parametrization(m[0], "weight", Scale()), "up linear is parametr"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m[3]), "down linear is parametrized"),
    "pruned": (lambda m: prune.l1_unstructured(m[0], "weight", 0.5), "up linear has a forward pre-hook"),
    "low rank": (lambda m: m.__setitem__(0, LowRank(m[0])), "LowRank, not exactly nn.Linear"),
    "low rank, both": (lambda m: (m.__setitem__(0, LowRank(m[0])), m.__setitem__(3, LowRank(m[3]))), "LowRank"),
    "subclass": (lambda m: m.__setitem__(3, Doubled(10, 6)), "Doubled, not exactly nn.Linear"),
    "tensor subclass": (_tag, "TaggedTensor, not a plain tensor"),
    "set forward": (lambda m: setattr(m[0], "forward", lambda x: x.new_ones(*x.shape[:-1], 10)), "set on the instance"),
    "compiled": (lambda m: m[0].compile(backend="eager"), "the up linear is compiled by itself"),
    "other activation": (
        lambda m: m.__setitem__(1, nn.Softplus()),
        "activation Softplus(beta=1.0, threshold=20.0) is not a known one",
    ),
    "other slope": (lambda m: m.__setitem__(1, nn.LeakyReLU(0.2)), "activation LeakyReLU(negative_slope=0.2) is not"),
    "other dropout": (lambda m: m.__setitem__(2, nn.AlphaDropout(0.25)), "the dropout is a AlphaDropout"),
    "all dropped": (lambda m: setattr(m[2], "p", 1.0), "the dropout has p=1.0, outside [0, 1)"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_children_that_are_not_plain_are_called(change: str, when: str, fused_calls: list[float]) -> None:
    """Changed before `replace` they are reported; changed after it, the original forward runs, and says why."""
    model, x = mlp(p=0.25), torch.randn(3, 6)
    apply, reason = CHANGES[change]
    if when == "after":
        fl.replace(model)
    apply(model)
    if when == "before":
        with pytest.warns(UserWarning, match="nothing was replaced"):
            [entry] = fl.replace(model).skipped
        assert (entry.path, entry.module, entry.became) == ("", "Sequential", None)
        assert entry.reason.startswith("0..3: ")
        assert reason in entry.reason
        assert type(model) is nn.Sequential
        return
    assert reason in model.why_called()
    ours = results(model, x)
    assert not fused_calls
    fl.restore(model)
    assert_same(ours, results(model, x))


def test_low_rank_adapters_train(fused_calls: list[float]) -> None:
    model = nn.Sequential(mlp(), mlp())
    fl.replace(model)
    model[0][0] = LowRank(model[0][0])
    model(torch.randn(3, 6)).square().sum().backward()
    assert len(fused_calls) == 1
    assert model[0][0].base.weight.grad is None
    assert model[0][0].b.weight.grad.abs().sum() > 0


def test_a_child_becomes_plain_again(fused_calls: list[float]) -> None:
    model = mlp()
    fl.replace(model)
    handle = model[0].register_forward_hook(lambda *_: None)
    model(torch.ones(6))
    assert not fused_calls
    handle.remove()
    model(torch.ones(6))
    assert fused_calls


def test_a_copied_decoder_computes_what_torchs_copy_computes() -> None:
    """torch's decoder layer forgets an activation module when it is copied and takes relu instead; so does ours."""
    model, x = Decoder(nn.GELU(), False), torch.randn(2, 3, 6)
    theirs = results(copy.deepcopy(model), x)
    fl.replace(model)
    assert_same(results(copy.deepcopy(model), x), theirs)


@each_block
def test_hooks_for_all_modules_see_the_children(block: str, fused_calls: list[float]) -> None:
    model = BLOCKS[block][0]()
    replaced(model)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(module))
    try:
        model(torch.randn(2, 3, 6))
    finally:
        handle.remove()
    assert not fused_calls
    linears = {module for module in model.modules() if type(module) is nn.Linear}
    assert linears
    assert linears <= set(seen)


def test_the_inference_kernel_of_torch_stays(fused_calls: list[float]) -> None:
    layers = nn.TransformerEncoder(encoder("relu", False, True), 2).eval()
    x, padding = torch.randn(2, 3, 6), torch.tensor([[False, False, True], [False, False, False]])
    # The packed batch is a nested tensor, and torch says once per process that those may still change.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = layers(x, src_key_padding_mask=padding)
        assert len(fl.replace(layers).replaced) == 2
        assert torch.equal(layers(x, src_key_padding_mask=padding), theirs)
        assert not fused_calls
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            layers(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(fused_calls) == 2


def test_blocks_that_are_sharded_later_stay_fused(mesh: DeviceMesh, fused_calls: list[float]) -> None:
    model, x = nn.Sequential(mlp(), GatedBlock()), torch.randn(3, 6)
    theirs = model(x)
    fl.replace(model, rules=[RULE])
    for block in (model[0], model[1], model):
        fully_shard(block, mesh=mesh)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, theirs)
    assert len(fused_calls) == 2
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sharded_children_are_left_alone(mesh: DeviceMesh, fused_calls: list[float]) -> None:
    model, x = nn.Sequential(mlp(), mlp()), torch.randn(3, 6)
    theirs = model(x)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        left = {entry.path: entry.reason for entry in fl.replace(model).skipped}
    assert "DTensor, not a plain tensor" in left["0"]
    assert "DTensor, not a plain tensor" in left["1"]
    assert torch.equal(model(x), theirs)
    assert not fused_calls


def test_other_calls_of_a_block_run_its_own_forward(fused_calls: list[float]) -> None:
    model, x = GatedBlock(), torch.randn(3, 6)
    theirs = model(x, 2.0)
    replaced(model)
    assert torch.equal(model(x, 2.0), theirs)
    assert torch.equal(model(x, scale=2.0), theirs)
    assert type(model(x.as_subclass(TaggedTensor))) is TaggedTensor
    assert not fused_calls
    assert torch.equal(model(x=x), theirs / 2)
    assert len(fused_calls) == 1, "the same call, by name"


def test_restore_without_replacements() -> None:
    model = nn.ModuleDict({"a": mlp(), "b": fl.FusedFFN(6, 10)})
    classes = [type(module) for module in model.modules()]
    fl.restore(model)
    assert [type(module) for module in model.modules()] == classes


def test_restore_refuses_a_class_that_was_changed_again() -> None:
    model = nn.ModuleDict({"first": mlp(), "second": mlp()})
    fl.replace(model)
    model.second.__class__ = type("Sharded", (type(model.second),), {})
    with pytest.raises(ValueError, match=r"second became a .*Sharded since it was replaced"):
        fl.restore(model)
    assert type(model.first) is fl.replacing.FusedSequentialFFN


def test_the_model_itself_can_be_a_block() -> None:
    model = mlp()
    assert fl.replace(model).replaced[0].path == ""
    assert "FusedSequentialFFN" in repr(model)
    fl.restore(model)
    assert repr(model) == repr(mlp())


def test_a_registry_of_subclasses_does_not_see_the_fused_class() -> None:
    known: list[type] = []

    class Registered(GatedBlock):
        def __init_subclass__(cls) -> None:
            known.append(cls)

    fl.replace(Registered(), rules=[rule_for(Registered)])
    assert known == []
