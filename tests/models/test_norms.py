"""Models of transformers with `replace`: their norms run torch's fused ones, and everything else stays."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.norms import FusedNorm
from tests.models.small import FAMILIES, LAYERS, Family
from tests.models.test_families import installed
from tests.support.ffn_blocks import assert_same, pickled

_PER_LAYER = {"Llama": 2, "Qwen3": 4, "Gemma 2": 4, "OLMo": 2, "Cohere": 1}
# In an encoder layer two, in a decoder layer three, and one behind each stack.
NORMS = {name: count * LAYERS + 1 for name, count in _PER_LAYER.items()} | {"T5": 5 * LAYERS + 2}
each_model = pytest.mark.parametrize("name", NORMS)


def family(name: str) -> Family:
    if name in FAMILIES:
        return installed(name)
    own = {"OLMo": "Olmo"}.get(name, name)
    return replace(
        installed("Llama"), model=f"{own}ForCausalLM", config=f"{own}Config", blocks=(f"{own}MLP",)
    )  # fmt: skip


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedNorm)]


def built(name: str) -> tuple[Family, Any, dict[str, Any]]:
    found = family(name)
    torch.manual_seed(0)
    model = found.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return found, model, found.inputs()


@each_model
def test_a_model_trains_and_is_restored(name: str) -> None:
    found, model, inputs = built(name)
    # The mask of T5's fused FFN is not the one that nn.Dropout draws.
    model.train(name != "T5")
    truth = found.truth(copy.deepcopy(model).double(), inputs)
    theirs = found.results(model, inputs)
    keys, classes = model.state_dict().keys(), [type(module) for module in model.modules()]
    report = fl.replace(model)
    assert not report.skipped
    assert len(norms(model)) == NORMS[name]
    ours = found.results(model, inputs)
    assert_all_close(ours, theirs, truth)
    assert model.state_dict().keys() == keys
    for twin in (copy.deepcopy(model), pickled(model)):
        assert len(norms(twin)) == NORMS[name]
        assert_same(found.results(twin, inputs), ours)
    fl.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert_same(found.results(model, inputs), theirs)
