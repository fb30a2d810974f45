"""Adapters of peft train on replaced models, whichever came first; offloaded models stay what accelerate made them."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.replacing import LinearRule
from tests.models.small import Family, blocks
from tests.models.test_families import installed
from tests.support.ffn_blocks import assert_same, count_fused_calls

# (family, linears with adapters): those of the attention leave the FFN as it is, those of the FFN are fused with it.
ADAPTERS = {
    "Llama, attention": ("Llama", ["q_proj", "v_proj"]),
    "Llama, FFN": ("Llama", ["gate_proj", "down_proj"]),
    "GPT-2, attention": ("GPT-2", ["c_attn"]),
    "GPT-2, FFN": ("GPT-2", ["mlp.c_fc", "mlp.c_proj"]),
    "BERT, attention": ("BERT", ["query", "value"]),
    "BERT, FFN": ("BERT", ["intermediate.dense"]),
}


def _with_adapters(model: nn.Module, family: Family, targets: list[str], dropout: float = 0.0) -> nn.Module:
    peft = importlib.import_module("peft")
    torch.manual_seed(3)
    transposed = family.model.startswith("GPT2")
    # Random numbers in both factors: with zeros in one of them the adapters would compute nothing.
    options = {"r": 4, "init_lora_weights": False, "fan_in_fan_out": transposed, "lora_dropout": dropout}
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))


@pytest.mark.sampled
@pytest.mark.parametrize("case", ADAPTERS)
@pytest.mark.parametrize("first", ["replace", "adapters"])
def test_adapters_train(case: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, targets = ADAPTERS[case]
    family = installed(name)
    pytest.importorskip("peft", exc_type=ImportError)
    plain, inputs = family.build().eval(), family.inputs()
    ours = copy.deepcopy(plain)
    theirs = _with_adapters(plain, family, targets).eval()
    truth = family.truth(copy.deepcopy(theirs).double(), inputs)
    expected = family.results(theirs, inputs)
    fused = "attention" in case
    calls = count_fused_calls(monkeypatch)
    if first == "replace":
        fl.replace(ours)
        ours = _with_adapters(ours, family, targets)
    else:
        ours = _with_adapters(ours, family, targets)
        assert len(blocks(fl.replace(ours).replaced)) == family.count
    with decisions() as paths:
        found = family.results(ours.eval(), inputs)
    assert_all_close(found, expected, truth)
    assert len(calls) == (family.count if fused else 0)
    assert paths["lora_ffn torch"] == (0 if fused else family.count)
    trained = {key for key, tensor in found.items() if tensor is not None} - {"logits", "loss"}
    assert trained
    assert all("lora_" in key for key in trained)
    saved = importlib.import_module("peft").get_peft_model_state_dict
    assert saved(ours).keys() == saved(theirs).keys()
    # Merged into the weights and taken off, nothing is left of them but their effect.
    merged = ours.merge_and_unload()
    assert not blocks(fl.replace(merged).replaced)
    calls.clear()
    with torch.no_grad():
        family.run(merged, inputs)
    assert len(calls) == family.count


def test_a_step_with_dropout_in_the_adapters() -> None:
    family = installed("Llama")
    pytest.importorskip("peft", exc_type=ImportError)
    ours = _with_adapters(family.build(), family, ["gate_proj", "up_proj", "down_proj"], dropout=0.25).train()
    theirs, inputs = copy.deepcopy(ours), family.inputs()
    assert len(blocks(fl.replace(ours).replaced)) == family.count
    optimizer = torch.optim.SGD([parameter for parameter in ours.parameters() if parameter.requires_grad], lr=0.1)
    with decisions() as paths:
        _, loss = family.run(ours, inputs)
    assert paths["lora_ffn torch"] == family.count
    assert loss.isfinite()
    loss.backward()
    optimizer.step()
    state = ours.state_dict()
    assert any(not torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    theirs.load_state_dict(state)
    with torch.no_grad():
        found, expected = (family.run(model.eval(), inputs)[0] for model in (ours, theirs))
    torch.testing.assert_close(found, expected)


def test_adapters_on_linears_that_split_their_sums() -> None:
    family = installed("Llama")
    pytest.importorskip("peft", exc_type=ImportError)
    plain, inputs = family.build().eval(), family.inputs()
    ours = copy.deepcopy(plain)
    expected = family.results(_with_adapters(plain, family, ["q_proj", "v_proj"]).eval(), inputs)
    report = fl.replace(ours, rules=[LinearRule(names="*_proj")])
    assert sum(entry.became == "FusedSplitKLinear" for entry in report.replaced) == 4 * family.count
    found = family.results(_with_adapters(ours, family, ["q_proj", "v_proj"]).eval(), inputs)
    assert_same(found, expected)


@pytest.mark.parametrize("first", ["replace", "offload"])
def test_offloaded_models_compute_the_same(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps weights elsewhere, and fetches them in a forward that it sets on every module."""
    family = installed("BERT")
    accelerate = importlib.import_module("accelerate")
    model, inputs = family.build().eval(), family.inputs()
    with torch.no_grad():
        theirs, _ = family.run(model, inputs)
    if first == "replace":
        fl.replace(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    if first == "offload":
        with pytest.warns(UserWarning, match="has a forward of its own, set on the instance"):
            fl.replace(model)
    calls = count_fused_calls(monkeypatch)
    with torch.no_grad():
        ours, _ = family.run(model, inputs)
    assert torch.equal(ours, theirs)
    assert not calls


def test_a_tied_head_may_split_its_sums() -> None:
    family = installed("Llama")
    model, inputs = family.build(tie_word_embeddings=True).eval(), family.inputs()
    theirs, keys = family.results(model, inputs), list(model.state_dict())
    report = fl.replace(model, norm=False, rules=[LinearRule(names="lm_head")])
    assert [entry.path for entry in report.replaced][-1] == "lm_head"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert list(model.state_dict()) == keys
    assert_same(family.results(model, inputs), theirs)
