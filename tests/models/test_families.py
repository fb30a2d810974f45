"""Models of transformers and timm compute after `replace` what they computed before, and again after `restore`."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.replacing import torch_module_activation
from tests.models.small import FAMILIES, TORCH_GELU_TANH, Family, Results, blocks
from tests.support.ffn_blocks import assert_same, count_fused_calls, seeded_dropout
from tests.support.operands import assert_close_or_again

each_family = pytest.mark.parametrize("name", FAMILIES)
# What families share, as their blocks and the steps of a training are, every third shows; `make test-full` runs all.
some_families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (place % 3 > 0)) for place, name in enumerate(FAMILIES)]
)

# Why a library may be missing.
REASONS = {
    "transformers": "transformers is not installed: pip install 'fusedlayers[models]'",
    "timm": "timm is not installed: it needs torchvision, whose wheels on PyPI fail beside the CPU build of torch; "
    "with the CUDA build of torch: pip install 'fusedlayers[timm]'",
}


def installed(name: str) -> Family:
    """The family; the test is skipped where its library is missing."""
    family = FAMILIES[name]
    pytest.importorskip(family.package, reason=REASONS[family.package], exc_type=ImportError)
    return family


def _replaced(model: nn.Module, family: Family, **options: Any) -> None:
    report = fl.replace(model, **options)
    replaced = blocks(report.replaced)
    assert len(replaced) == family.count
    assert {entry.became for entry in replaced} == {f"Fused{block}" for block in family.blocks}
    assert not report.skipped


@each_family
def test_it_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, loss and every gradient: through torch, in the kernels, and bit for bit what it was after `restore`."""
    family = installed(name)
    model, inputs = family.build().eval(), family.inputs()
    truth = family.truth(copy.deepcopy(model).double(), inputs)
    theirs = family.results(model, inputs)
    keys, tensors = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    calls = count_fused_calls(monkeypatch)
    _replaced(model, family)
    assert (list(model.state_dict()), [id(parameter) for parameter in model.parameters()]) == (keys, tensors)
    assert_all_close(family.results(model, inputs), theirs, truth)
    assert len(calls) == family.count
    fl.restore(model)
    assert_same(family.results(model, inputs), theirs)
    assert len(calls) == family.count


@pytest.mark.interpreter
@some_families
def test_the_kernels_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = installed(name)

    def compared(_: int) -> tuple[Results, Results, Results]:
        model, inputs = family.build().eval(), family.inputs()
        truth = family.truth(copy.deepcopy(model).double(), inputs)
        theirs = family.results(model, inputs)
        fl.replace(model)
        with monkeypatch.context() as kernels:
            kernels.setenv("FUSEDLAYERS_BACKEND", "triton")
            return family.results(model, inputs), theirs, truth

    assert_close_or_again(compared)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "autocast"])
def test_it_computes_the_same_in_16_bits(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = installed(name)
    model, inputs = family.build().eval(), family.inputs()
    mixed = dtype == "autocast"
    model = model if mixed else model.to(getattr(torch, dtype))
    truth = family.truth(copy.deepcopy(model).double(), inputs)
    calls = count_fused_calls(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        theirs = family.results(model, inputs)
        fl.replace(model)
        ours = family.results(model, inputs)
    assert_all_close(ours, theirs, truth, computed_in=torch.bfloat16 if mixed else None)
    assert len(calls) == family.count


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "RoBERTa", "ViT", "T5", "Whisper"])
def test_dropout_draws_the_same_numbers(name: str) -> None:
    family = installed(name)
    model, inputs = family.build(**TORCH_GELU_TANH.get(name, {})).train(), family.inputs()
    with seeded_dropout():
        theirs = family.results(model, inputs)
    # With torch's own dropout: one that somebody has patched is no dropout that is known.
    fl.replace(model, norm=False)
    with seeded_dropout():
        ours = family.results(model, inputs)
    assert_same({key: ours[key] for key in ("logits", "loss")}, {key: theirs[key] for key in ("logits", "loss")})
    assert not torch.equal(family.results(model.eval(), inputs)["logits"], theirs["logits"])


def test_generation_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache of keys and values, so that all but the first call have one token."""
    family = installed("Llama")
    model, prompt = family.build().eval(), family.inputs()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    calls = count_fused_calls(monkeypatch)
    fl.replace(model)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options), theirs)
    assert len(calls) == 6 * family.count


def test_a_subclass_computes_what_it_computed() -> None:
    family = installed("BERT")
    model = family.build()
    layer = model.bert.encoder.layer[0]
    own = type(layer).feed_forward_chunk
    layer.__class__ = type("Mine", (type(layer),), {"feed_forward_chunk": lambda self, x: own(self, x) + x})
    inputs = family.inputs()
    expected = family.results(model, inputs)
    fl.replace(model)
    assert_same(family.results(model, inputs), expected)


def test_half_of_a_t5_in_float32_is_left() -> None:
    """transformers keeps wo in float32 where it loads the rest in float16."""
    family = installed("T5")
    model = family.build().half()
    for module in model.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    with pytest.warns(UserWarning, match="the linears differ in dtype or device"):
        fl.replace(model, norm=False)


# transformers' names of activations, and ours, also of those that are none of ours.
ACTIVATION_NAMES = {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid", "silu": "silu", "swish": "silu",
    "tanh": "tanh", "linear": "identity", "leaky_relu": "leaky_relu",
    "laplace": "laplace", "mish": "mish", "relu6": "relu6", "hardswish": "hardswish", "gelu_10": None, "prelu": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_activations_of_transformers_are_recognised(name: str) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    activation = importlib.import_module("transformers.activations").ACT2FN[name]
    found = torch_module_activation(activation)
    ours = ACTIVATION_NAMES[name]
    assert found == (ours if ours in ACTIVATIONS else None)
    if found is not None:
        z = torch.linspace(-6, 6, 101, dtype=torch.float64)
        # FastGELU writes a constant with ten digits.
        torch.testing.assert_close(activation(z), ACTIVATIONS[found].torch(z), rtol=0, atol=1e-9)
