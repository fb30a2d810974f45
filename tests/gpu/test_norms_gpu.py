"""Norms on a GPU run in torch's fused kernels, forward and backward; and Liger-Kernel's beside our layers."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.norms import FusedNorm, Norm, recognise_norm
from fusedlayers.replacing.rules import LIGER_RULES, FFNRule
from tests.models.loss_heads import build, truth
from tests.models.loss_heads import results as model_results
from tests.support.ffn_blocks import results
from tests.support.norm_modules import NORMS, WIDTH, Gemma, Llama, in_float64
from tests.support.operands import DEVICE, assert_draws_close

# Triton 3.9 says this of kernels that do not name what 3.10 will change; ours do, Liger's do not.
_of_liger = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
_BACKWARD = {"rms_norm": "FusedRmsNormBackward0", "layer_norm": "NativeLayerNormBackward0"}


def replaced(norm: nn.Module) -> Norm:
    fl.replace(norm)
    assert isinstance(norm, FusedNorm)
    return norm.fused_norm


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fused_kernels_are_close(name: str, dtype: torch.dtype) -> None:
    norm = NORMS[name][0]().to(DEVICE, dtype)
    x = torch.randn(9, 700, WIDTH, device=DEVICE).mul(torch.rand(9, 700, 1, device=DEVICE) * 4).to(dtype)
    exact, theirs = results(in_float64(norm), x.double()), results(norm, x)
    found = replaced(norm)
    ours = results(norm, x)
    assert_all_close(ours, theirs, exact)
    again = results(norm, x)
    assert all(torch.equal(tensor, again[key]) for key, tensor in ours.items() if tensor is not None)
    if dtype is torch.float32:
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())  # type: ignore[arg-type]
    elif not found.one_plus:
        assert type(norm(x.requires_grad_()).grad_fn).__name__ == _BACKWARD[found.operation]


def test_in_float32_the_fused_kernels_run_under_autocast() -> None:
    norm, x = Llama().to(DEVICE), torch.randn(300, WIDTH, device=DEVICE, requires_grad=True)
    theirs = norm(x)
    [entry] = fl.replace(norm).replaced
    assert "under autocast alone" in (entry.why_no_kernels or "")
    assert torch.equal(norm(x), theirs)
    with torch.autocast("cuda", torch.bfloat16):
        ours = norm(x)
    assert type(ours.grad_fn).__name__ == _BACKWARD["rms_norm"]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("width", [64, 128, 1000, 1001, 8192])
def test_any_width_and_layout(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.norm_modules.WIDTH", width)
    norm = Llama().to(DEVICE, torch.bfloat16)
    whole = torch.randn(3, 40, 6, width, device=DEVICE, dtype=torch.bfloat16)
    layouts = [whole.transpose(1, 2), whole[:, ::2], whole.to(memory_format=torch.channels_last), whole[0, 0, 0]]
    given = [(x, results(in_float64(norm), x.double()), results(norm, x)) for x in (*layouts, whole[:0])]
    replaced(norm)
    for x, exact, theirs in given:
        assert_all_close(results(norm, x), theirs, exact)


@pytest.mark.parametrize("kind", [Llama, Gemma])
def test_it_keeps_what_the_report_says(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.norm_modules.WIDTH", 1024)
    norm = kind().to(DEVICE, torch.bfloat16)
    x = torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def kept() -> int:
        """Bytes beside the result; the input is there anyway."""
        before = torch.cuda.memory_allocated()
        y = norm(x)
        return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()

    own = kept()
    [entry] = fl.replace(norm).replaced
    assert entry.why_no_kernels is None
    # Gemma's norm keeps its input in float32, Llama's as it is.
    ours = kept() + (x.untyped_storage().nbytes() if kind is Llama else 0)
    # Of the weight a copy may be kept, too.
    assert entry.saved_bytes == (pytest.approx(own / 4096, abs=2), pytest.approx(ours / 4096, abs=2))


@_of_liger
@pytest.mark.parametrize("rule", LIGER_RULES, ids=lambda rule: rule.class_path.rpartition(".")[2])
def test_liger_computes_what_the_rules_say(rule: FFNRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to float64 as torch's operations are: some of its kernels round less than these."""
    pytest.importorskip("liger_kernel.transformers", reason="Liger-Kernel is not installed")
    from tests.models.test_liger import known

    block = known(rule.class_path).to(DEVICE, torch.bfloat16)
    x = torch.randn(3, 100, 24, device=DEVICE, dtype=torch.bfloat16)
    ligers = results(block, x)
    exact = copy.deepcopy(block).double()
    fl.replace(exact)
    reference = results(exact, x.double())
    fl.replace(block)
    ours = results(block, x)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    torchs = results(block, x)
    assert_all_close(ligers, torchs, reference)
    assert_all_close(ours, torchs, reference)


@_of_liger
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_liger_with_our_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/models.md: its norms and rotary embedding, our FFN and loss."""
    liger: Any = pytest.importorskip("liger_kernel.transformers", reason="Liger-Kernel is not installed")
    model: Any = build(name, hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=4096).to(DEVICE)
    model = model.to(torch.bfloat16).train()
    library = importlib.import_module(type(model).__module__)
    texts = [torch.randint(3, 4096, (4, 128), device=DEVICE) for _ in range(12)]
    draws = [{"input_ids": words, "labels": words} for words in texts]
    exact = [truth(copy.deepcopy(model), inputs) for inputs in draws]
    theirs = [model_results(model, inputs) for inputs in draws]
    for changed in ("apply_rotary_pos_emb", f"{name}MLP", f"{name}RMSNorm"):
        monkeypatch.setattr(library, changed, getattr(library, changed))
    apply = getattr(liger, f"apply_liger_kernel_to_{name.lower()}")
    apply(swiglu=False, fused_linear_cross_entropy=False, model=model)
    report = fl.replace(model, strict=True)
    assert {entry.module for entry in report.replaced} == {f"{name}MLP", f"{name}ForCausalLM"}
    ours = [model_results(model, inputs) for inputs in draws]
    assert_draws_close(list(zip(ours, theirs, exact, strict=True)), independent=texts[0].numel())


def test_norms_are_recognised_where_they_lie() -> None:
    norm = Llama().to(DEVICE)
    assert isinstance(recognise_norm(norm), Norm)
