"""Liger-Kernel beside ours: its blocks are known, and its norms and rotary embedding run with our FFN and loss."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.replacing.rules import LIGER_RULES, FFNRule
from tests.models.small import LAYERS, WIDTH
from tests.models.test_families import installed
from tests.support.ffn_blocks import assert_same, pickled, results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:liger_kernel")
liger: Any = pytest.importorskip("liger_kernel.transformers", reason="Liger-Kernel is not installed")
# On Hopper its kernels take rows of whole 16 bytes.
CONFIG = SimpleNamespace(
    hidden_size=WIDTH, intermediate_size=2 * WIDTH + 8, hidden_act="silu", hidden_activation="silu",
)  # fmt: skip


def known(path: str) -> nn.Module:
    module, _, kind = path.rpartition(".")
    made: nn.Module = getattr(importlib.import_module(module), kind)(CONFIG)
    return made


@pytest.mark.interpreter
@pytest.mark.parametrize("rule", LIGER_RULES, ids=lambda rule: rule.class_path.rpartition(".")[2])
def test_its_blocks_are_known(rule: FFNRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of theirs runs without a GPU: what our kernels compute is compared with the formula."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    block, x = known(rule.class_path), torch.randn(3, 7, WIDTH)
    kind = type(block)

    def formula(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def computed(x: torch.Tensor) -> torch.Tensor:
            up, down = (getattr(block, name) for name in (rule.up, rule.down))
            gate, z = up(x).chunk(2, -1) if rule.gate is None else (getattr(block, rule.gate)(x), up(x))
            return down(ACTIVATIONS[rule.activation].torch(gate) * z)

        return computed

    exact = copy.deepcopy(block).double()
    truth = results(exact, x.double(), call=formula(exact))
    theirs = results(block, x, call=formula(block))
    [entry] = fl.replace(block, strict=True).replaced
    assert entry.became == f"Fused{kind.__name__}"
    ours = results(block, x)
    assert_all_close(ours, theirs, truth)
    for twin in (copy.deepcopy(block), pickled(block)):
        assert_same(results(twin, x), ours)
    fl.restore(block)
    assert type(block) is kind


@pytest.mark.interpreter
def test_its_rotary_embedding_with_our_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/models.md, but for its norms, which the interpreter cannot run."""
    family = installed("Llama")
    plain = family.build().train()
    library = importlib.import_module(type(plain).__module__)
    for name in ("apply_rotary_pos_emb", "LlamaMLP", "LlamaRMSNorm"):
        monkeypatch.setattr(library, name, getattr(library, name))
    inputs = family.inputs()
    truth = family.truth(copy.deepcopy(plain).double(), inputs)
    theirs = family.results(plain, inputs)
    liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, rms_norm=False)
    model = family.build().train()
    model.load_state_dict(plain.state_dict())
    report = fl.replace(model, strict=True)
    classes = [entry.module for entry in report.replaced]
    assert classes.count("LigerSwiGLUMLP") == LAYERS
    assert classes.count("LlamaRMSNorm") == 2 * LAYERS + 1
    assert classes.count("LlamaForCausalLM") == 1
    assert_all_close(family.results(model, inputs), theirs, truth)


def test_its_norms_stay_its_own() -> None:
    model = nn.Sequential(liger.LigerRMSNorm(WIDTH), known("liger_kernel.transformers.swiglu.LigerSwiGLUMLP"))
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["1"]
    assert not report.skipped


def test_a_model_that_it_changed_already_says_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an instance Liger-Kernel sets forwards, which come before any class."""
    model = installed("Llama").build()
    library = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(library, "apply_rotary_pos_emb", library.apply_rotary_pos_emb)
    for name in ("LlamaMLP", "LlamaRMSNorm"):
        monkeypatch.setattr(library, name, getattr(library, name))
    liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
    report = fl.replace(model)
    left = [entry for entry in report.skipped if "set on the instance" in entry.reason]
    assert [entry.module for entry in left].count("LlamaMLP") == LAYERS
    assert [entry.module for entry in left].count("LlamaRMSNorm") == 2 * LAYERS + 1
