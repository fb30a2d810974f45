"""Small causal models of several families, and what the tests of their losses ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.models.small import InFloat64

WORDS, WIDTH, IGNORED = 61, 24, -100
_SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 1, "head_dim": WIDTH // 2}
# By the name of the family: model, configuration, and options beyond its sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    # Its forward adds a loss of its own.
    "Mixtral": (
        "MixtralForCausalLM", "MixtralConfig", _GROUPED | {"num_local_experts": 2, "output_router_logits": True},
    ),
    "GPT-2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    # With a bias.
    "Phi": ("PhiForCausalLM", "PhiConfig", _SIZES | {"resid_pdrop": 0.0}),
    # Its forward calls contiguous().
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        {name: value for name, value in _SIZES.items() if name != "intermediate_size"}
        | {"ffn_dim": 40, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    ),
    # With a softcap.
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", _GROUPED | {"final_logit_softcapping": 2.0}),
    # Divides and multiplies.
    "Granite": ("GraniteForCausalLM", "GraniteConfig", _GROUPED | {"logits_scaling": 0.25}),
    "Cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED | {"logit_scale": 3.0}),
    # Casts the hidden states and the logits.
    "Mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0,
         "use_mambapy": False},
    ),
}  # fmt: skip
Inputs = dict[str, Any]


def build(name: str, **options: Any) -> nn.Module:
    """A small model with logits that are not all alike."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    model, config, own = FAMILIES[name]
    torch.manual_seed(0)
    configured = getattr(library, config)(**own | {"use_cache": False, "attn_implementation": "eager"} | options)
    configured._experts_implementation = "eager"
    made: nn.Module = getattr(library, model)(configured)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def text(draw: int = 0) -> Inputs:
    """Two texts; of one the beginning is no target."""
    torch.manual_seed(1 + draw)
    words = torch.randint(3, WORDS, (2, 9))
    labels = words.clone()
    labels[0, :4] = IGNORED
    return {"input_ids": words, "labels": labels}


def results(model: nn.Module, inputs: Inputs, **options: Any) -> dict[str, Tensor | None]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs, **options)[0]
    loss.backward()
    gradients = {f"d {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach().clone()} | {
        name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()
    }


def truth(model: nn.Module, inputs: Inputs, **options: Any) -> dict[str, Tensor | None]:
    """The same in float64, of a model that is not needed any more."""
    with InFloat64():
        return results(model.double(), inputs, **options)


def replaced(model: nn.Module) -> fl.Entry:
    """What the report says of the loss, now without logits; nothing else of the model is replaced."""
    report = fl.replace(model)
    [entry] = (entry for entry in report.replaced if entry.became == "FusedLossHead")
    for child in model.children():
        fl.restore(child)
    return entry


def losses(paths: Mapping[str, int]) -> int:
    """How many losses ran in kernels, where none ran elsewhere."""
    assert "linear_cross_entropy torch" not in paths
    return sum(count for path, count in paths.items() if path.startswith("linear_cross_entropy "))


@contextmanager
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Losses run in kernels; yields how many calls took which path."""
    with monkeypatch.context() as patch, decisions() as paths:
        patch.setenv("FUSEDLAYERS_BACKEND", "triton")
        yield paths
