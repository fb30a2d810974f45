"""Small causal models of several families with experts, and what the tests of their experts ask of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from tests.models.small import InFloat64
from tests.support import seeds

WORDS, WIDTH, HIDDEN, EXPERTS, TOP_K, LAYERS = 61, 24, 20, 5, 2, 2
_SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 28, "moe_intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": WIDTH // 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
}  # fmt: skip
_LOCAL = {name: value for name, value in _SIZES.items() if name not in ("num_experts", "moe_intermediate_size")} | {
    "num_local_experts": EXPERTS,
    "intermediate_size": HIDDEN,
}
_ROUTED = {name: value for name, value in _SIZES.items() if name != "num_experts"} | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT = {name: value for name, value in _ROUTED.items() if name != "head_dim"} | {
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 12,
    "num_key_value_heads": 2,
}  # fmt: skip
# By the name of the family: its name in transformers' classes, options of its configuration, and what the report says.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mixtral": ("Mixtral", _LOCAL, "gated silu"),
    "Qwen2-MoE": ("Qwen2Moe", _SIZES | {"shared_expert_intermediate_size": 28}, "gated silu"),
    "Qwen3-MoE": ("Qwen3Moe", _SIZES, "gated silu"),
    "OLMoE": ("Olmoe", _SIZES | {"intermediate_size": HIDDEN}, "gated silu"),
    "DeepSeek-V2": ("DeepseekV2", _LATENT | {"topk_method": "greedy"}, "gated silu"),
    "DeepSeek-V3": ("DeepseekV3", _LATENT, "gated silu"),
    "GLM-4-MoE": ("Glm4Moe", _ROUTED, "gated silu"),
    "Granite-MoE": ("GraniteMoe", _LOCAL, "gated silu"),
    "PhiMoE": ("Phimoe", _LOCAL, "gated silu"),
    # Interleaved, transposed, with biases, and a gate of its own.
    "gpt-oss": ("GptOss", _LOCAL, "gated quick_gelu within ±7, up + 1"),
    # Other activations than the published one.
    "Qwen3-MoE, gelu": ("Qwen3Moe", _SIZES | {"hidden_act": "gelu"}, "gated gelu"),
    "Mixtral, relu": ("Mixtral", _LOCAL | {"hidden_act": "relu"}, "gated relu"),
    # Clamped by its configuration, and not gated.
    "MiniMax-M2": ("MiniMaxM2", _LOCAL, "gated silu"),
}
Inputs = dict[str, Any]
Results = dict[str, Tensor | None]


def build(name: str, **options: Any) -> nn.Module:
    """A small model, with the same weights every time, whose router is not undecided."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    prefix, own, _ = FAMILIES[name]
    torch.manual_seed(0)
    implementation = options.pop("experts_implementation", "eager")
    config = getattr(library, f"{prefix}Config")(**own | {"attn_implementation": "eager"} | options)
    config._experts_implementation = implementation
    made: nn.Module = getattr(library, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    # Some routers draw random numbers in training.
    return made.eval()


def experts(model: nn.Module) -> list[Any]:
    """The modules that hold experts."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def text(draw: int = 0) -> Inputs:
    torch.manual_seed(1 + draw)
    words = torch.randint(3, WORDS, (2, 9))
    return {"input_ids": words, "labels": words}


def results(model: nn.Module, inputs: Inputs) -> Results:
    """Logits, the loss and all gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    logits = torch.clone(outputs.logits)
    outputs.loss.backward()
    gradients = {f"d {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "loss": outputs.loss.detach().clone()} | {
        name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()
    }


def truth(model: nn.Module, inputs: Inputs) -> Results:
    """The same in float64, of a model that is not needed any more."""
    with InFloat64():
        return results(model.double(), inputs)


def replaced(model: nn.Module, **options: Any) -> list[fl.Entry]:
    """What the report says of the experts, which are fused now."""
    report = fl.replace(model, loss=False, **options)
    return [entry for entry in report.replaced if entry.module.endswith("Experts")]


def routed(tokens: int = 7, dtype: torch.dtype = torch.float32, draw: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts of each and their weights, for a module of experts."""
    generator = seeds.generator(5 + draw)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    index = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    return x, index, torch.rand(tokens, TOP_K, generator=generator).to(dtype).requires_grad_()
