"""A small model of every family that `replace` knows, with random weights: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Widths that divide nothing: tails everywhere.
WIDTH, HIDDEN, LAYERS, HEADS, WORDS = 24, 52, 2, 2, 61
_DECODER = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "vocab_size": WORDS, "max_position_embeddings": 64, "head_dim": WIDTH // HEADS,
}  # fmt: skip
_ENCODER = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "vocab_size": WORDS, "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {
    "d_model": WIDTH, "d_ff": HIDDEN, "d_kv": WIDTH // HEADS, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": WORDS, "decoder_start_token_id": 0,
}  # fmt: skip


def _tokens(*names: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randint(4, WORDS, (3, 11)) for name in names}


def _images(channels: int, size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(3, channels, size, size), "labels": torch.tensor([0, 2, 4])}


@dataclass(frozen=True)
class Family:
    """One row: the name that the table of support gives it, how to build a model and inputs, and what is replaced."""

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    blocks: tuple[str, ...]  # class of each kind of replaced block
    count: int
    package: str = "transformers"


def _transformers(
    name: str, config: str, options: dict[str, Any], inputs: Callable[[], dict[str, Tensor]], *blocks: str, count: int = LAYERS
) -> Family:
    def build(**others: Any) -> nn.Module:
        library = importlib.import_module("transformers")
        chosen = getattr(library, config)(**{"attn_implementation": "eager"} | options | others)
        return getattr(library, name)(chosen)

    return Family(name, build, inputs, blocks, count)


_WORDS_AND_LABELS = _tokens("input_ids", "labels")

FAMILIES: dict[str, Family] = {
    "Llama": _transformers("LlamaForCausalLM", "LlamaConfig", _DECODER, _WORDS_AND_LABELS, "LlamaMLP"),
    "Mistral": _transformers("MistralForCausalLM", "MistralConfig", _DECODER, _WORDS_AND_LABELS, "MistralMLP"),
    "Qwen2": _transformers("Qwen2ForCausalLM", "Qwen2Config", _DECODER, _WORDS_AND_LABELS, "Qwen2MLP"),
    "Qwen3": _transformers("Qwen3ForCausalLM", "Qwen3Config", _DECODER, _WORDS_AND_LABELS, "Qwen3MLP"),
    "Gemma": _transformers("GemmaForCausalLM", "GemmaConfig", _DECODER, _WORDS_AND_LABELS, "GemmaMLP"),
    "Gemma 2": _transformers("Gemma2ForCausalLM", "Gemma2Config", _DECODER, _WORDS_AND_LABELS, "Gemma2MLP"),
    "GPT-2": _transformers(
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 64},
        _WORDS_AND_LABELS, "GPT2MLP",
    ),
    "BERT": _transformers("BertForMaskedLM", "BertConfig", _ENCODER, _WORDS_AND_LABELS, "BertLayer"),
    "RoBERTa": _transformers("RobertaForMaskedLM", "RobertaConfig", _ENCODER, _WORDS_AND_LABELS, "RobertaLayer"),
    "ViT": _transformers(
        "ViTForImageClassification", "ViTConfig",
        {"image_size": 12, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.1}
        | {name: _ENCODER[name] for name in list(_ENCODER)[:4]},
        _images(3, 12), "ViTMLP",
    ),
    "T5": _transformers("T5ForConditionalGeneration", "T5Config", _T5, _WORDS_AND_LABELS, "T5DenseActDense", count=2 * LAYERS),
    "T5 1.1": _transformers(
        "T5ForConditionalGeneration", "T5Config", _T5 | {"feed_forward_proj": "gated-gelu"}, _WORDS_AND_LABELS,
        "T5DenseGatedActDense", count=2 * LAYERS,
    ),
    "Whisper": _transformers(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {
            "d_model": WIDTH, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "encoder_layers": LAYERS,
            "decoder_layers": LAYERS, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
            "vocab_size": WORDS, "num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 32,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
            "dropout": 0.1, "activation_dropout": 0.1,
        },
        lambda: {"input_features": torch.randn(3, 8, 18), "labels": torch.randint(4, WORDS, (3, 11))},
        "WhisperEncoderLayer", "WhisperDecoderLayer", count=2 * LAYERS,
    ),
}  # fmt: skip
