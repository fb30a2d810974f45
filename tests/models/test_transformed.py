"""Replaced models under compile, export, torch.func, loss scaling, checkpointing and saved-tensor hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.models.small import TORCH_GELU_TANH, Family, Inputs
from tests.models.test_families import installed
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.ffn_blocks import assert_same, count_fused_calls

# What torch says of itself while it compiles and exports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]

# One of each way to hold an FFN: a block of linears, of transposed ones, inside a method, inside a forward, of a vision
# model; with one layer, or one of each side.
WAYS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 1},
    "GPT-2": {"n_layer": 1},
    "BERT": {"num_hidden_layers": 1},
    "BART": {"encoder_layers": 1, "decoder_layers": 1},
    "ViT": {"num_hidden_layers": 1},
}
each_way = pytest.mark.parametrize("name", WAYS)


def _built(name: str) -> tuple[Family, nn.Module, Inputs]:
    """A family, a model of it, and inputs without labels: the loss of a library may log, which breaks graphs."""
    family = installed(name)
    inputs = family.inputs()
    labels = inputs.pop("labels")
    if name == "BART":
        inputs["decoder_input_ids"] = labels
    return family, family.build(**WAYS[name], **TORCH_GELU_TANH.get(name, {})).eval(), inputs


def _trained(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor | None]:
    """Logits and all gradients of their squares."""
    model.zero_grad()
    logits = call(**inputs).logits
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {name: each.grad for name, each in model.named_parameters()}


# tests/models/test_guards.py compiles others.
@pytest.mark.parametrize(
    "name", [name if name == "BART" else pytest.param(name, marks=pytest.mark.full) for name in WAYS]
)
def test_it_compiles_in_one_graph(name: str) -> None:
    _, model, inputs = _built(name)
    theirs = _trained(model, model, inputs)
    fl.replace(model)
    with decisions() as paths:
        ours = _trained(model, torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert_same(ours, theirs)
    assert paths["ffn torch"] >= 1
    assert counters["stats"]["unique_graphs"] == 1


def test_lengths_share_a_graph() -> None:
    """No more than two compilations for four lengths, and the numbers of eager calls."""
    _, model, _ = _built("Llama")
    fl.replace(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (5, 6, 2, 33):
        inputs = {"input_ids": torch.randint(4, 61, (2, length)), "use_cache": False}
        assert_same(_trained(model, compiled, inputs), _trained(model, model, inputs))
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_it_is_exported(name: str) -> None:
    _, model, inputs = _built(name)
    options = {"use_cache": False} if name == "Llama" else {}
    with torch.no_grad():
        theirs = model(**inputs, **options).logits
        fl.replace(model)
        exported = torch.export.export(model, (), {**inputs, **options})
        assert torch.equal(exported.module()(**inputs, **options).logits, theirs)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_gradients_of_each_sample_by_torch_func(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`functional_call` with other parameters, `grad`, and `vmap` over samples."""
    _, model, inputs = _built(name)
    texts = inputs["input_ids"]

    def of_each_sample() -> dict[str, Tensor]:
        parameters = {key: tensor.detach() * 1.5 for key, tensor in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], text: Tensor) -> Tensor:
            options = {"use_cache": False} if name == "Llama" else {}
            # Given, because building one looks into the values, which vmap refuses.
            mask = torch.zeros(1, 1, text.shape[0], text.shape[0])
            found = torch.func.functional_call(model, parameters, (text[None],), {"attention_mask": mask, **options})
            return found.logits.square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, texts)

    theirs = of_each_sample()
    calls = count_fused_calls(monkeypatch)
    fl.replace(model)
    assert_same(of_each_sample(), theirs)
    assert len(calls) == 1


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40])
def test_a_gradient_scaler_skips_when_it_skips_for_torch(scale: float) -> None:
    """Float16 under autocast: a large scale overflows in the backward pass, and the step is left out."""
    family = installed("Llama")
    plain, inputs = family.build(**WAYS["Llama"]).eval(), family.inputs()
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    scales, stepped = [], []
    for model in (plain, copy.deepcopy(plain)):
        if model is not plain:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
            assert fl.replace(model).replaced
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with torch.autocast("cpu", torch.float16):
            _, loss = family.run(model, inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append([not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)])
    assert scales[0] == scales[1]
    assert stepped[0] == stepped[1]
    assert any(stepped[0]) == (scale < 2.0**40)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_both_kinds_of_checkpointing(name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    family = installed(name)
    model, inputs = family.build(**TORCH_GELU_TANH.get(name, {})).train(), family.inputs()
    # The newer name of the method, where there is one: the older one warns there.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    # Reentrant: gradients arrive only where an input has one.
    model.enable_input_require_grads()
    theirs = family.results(model, inputs)
    calls = count_fused_calls(monkeypatch)
    fl.replace(model)
    assert_same(family.results(model, inputs), theirs)
    assert len(calls) == 2 * family.count


def test_saved_tensors_may_be_packed() -> None:
    """Hooks see every saved tensor of a replaced model, and what they hand back is what is used."""
    family = installed("Llama")
    model, inputs = family.build().eval(), family.inputs()
    fl.replace(model)
    theirs = family.results(model, inputs)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same(family.results(model, inputs), theirs)
    assert packed


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_ffn_gets_no_gradient_and_hands_one_on(recompute: bool) -> None:
    """As under adapters: only what is asked for, for every subset of frozen weights of a block."""
    family = installed("Llama")
    theirs, inputs = family.build(**WAYS["Llama"]).eval(), family.inputs()
    ours = copy.deepcopy(theirs)
    fl.replace(ours, recompute=recompute or "auto")
    names = [name for name, _ in theirs.named_parameters() if ".mlp." in name]
    for subset in range(2 ** len(names)):
        frozen = {name for place, name in enumerate(names) if subset >> place & 1}
        for model in (theirs, ours):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
                parameter.grad = None
        found, expected = (family.results(model, inputs) for model in (ours, theirs))
        assert {name for name, tensor in found.items() if tensor is None} == {f"d{name}" for name in frozen}
        if not recompute:
            assert_same(found, expected)


def test_a_block_may_be_checkpointed_by_itself() -> None:
    """`torch.utils.checkpoint` around one replaced block, the gradients of its input included."""
    family = installed("BERT")
    model = family.build().eval()
    fl.replace(model)
    layer = model.bert.encoder.layer[0]
    x = torch.randn(2, 5, 24, requires_grad=True)
    found = []
    for run in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        y = run(x)
        y = y[0] if isinstance(y, tuple) else y
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        found.append({str(place): tensor for place, tensor in enumerate((y.detach(), *gradients))})
    assert_same(*found)
