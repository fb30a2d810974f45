"""A small model of every family that `replace` knows, with random weights: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fusedlayers as fl

# Widths that divide nothing: tails everywhere.
WIDTH, HIDDEN, LAYERS, HEADS, WORDS = 24, 52, 2, 2, 61
# With the published widths; with fewer words the tokens would be alike, and their errors would not be independent.
PUBLISHED_WORDS = 4096

Inputs = dict[str, Tensor]
Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Family:
    """A model family: how to build a model and inputs, and which classes of blocks become fused, how often in all."""

    package: str
    model: str
    config: str
    options: dict[str, Any] = field(repr=False)
    inputs: Callable[[], Inputs] = field(repr=False)
    blocks: tuple[str, ...]
    count: int = LAYERS

    def build(self, **options: Any) -> nn.Module:
        """A small model; ``options`` change the configuration."""
        # Plain products of matrices: the same on every machine.
        eager = {"attn_implementation": "eager"} if self.package == "transformers" else {}
        return self._build(self.options | eager | options)

    def build_published(self, device: str = "meta") -> nn.Module:
        """One layer (of each kind) with the widths that the library takes by default, and a small vocabulary."""
        kept = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "num_labels")
        options = {name: value for name, value in self.options.items() if name in kept or name == "feed_forward_proj"}
        options |= {"vocab_size": PUBLISHED_WORDS} if "vocab_size" in self.options else {}
        # Texts of 512 words, whose positions some families count from the padding's on, as their published models do.
        options |= {"max_position_embeddings": 514} if "max_position_embeddings" in self.options else {}
        layers = {name: 1 for name in self.options if name in _LAYER_COUNTS}
        with torch.device(device):
            return self._build(options | layers)

    def published_inputs(self, tokens: int) -> Inputs:
        """Inputs for the published widths, of about so many tokens: texts of 512, images of 50 to 257, sounds."""
        if self.inputs is _sound:
            batch = tokens // 2048
            features, labels = torch.randn(batch, 80, 3000), torch.randint(4, PUBLISHED_WORDS, (batch, 448))
            return {"input_features": features, "labels": labels}
        if self.inputs is _text:
            return {name: torch.randint(4, PUBLISHED_WORDS, (tokens // 512, 512)) for name in ("input_ids", "labels")}
        batch = tokens // 256
        return {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(0, 5, (batch,))}

    def _build(self, options: dict[str, Any]) -> nn.Module:
        library = importlib.import_module(self.package)
        if self.package == "transformers":
            config = getattr(library, self.config)(**options)
            return getattr(library, self.model)(config)
        return getattr(importlib.import_module(self.config), self.model)(**options)

    def run(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(logits, loss)."""
        if self.package == "transformers":
            found = model(**inputs)
            # A copy is a tensor, whether the logits were computed or wait for somebody to read them.
            return torch.clone(found.logits), found.loss
        logits = model(inputs["pixel_values"])
        return logits, F.cross_entropy(logits, inputs["labels"])

    def results(self, model: nn.Module, inputs: Inputs) -> Results:
        """Logits, loss and all gradients, with the same random numbers every time."""
        model.zero_grad()
        torch.manual_seed(1)
        logits, loss = self.run(model, inputs)
        loss.backward()
        gradients = {f"d{name}": parameter.grad for name, parameter in model.named_parameters()}
        return {"logits": logits.detach(), "loss": loss.detach()} | gradients

    def truth(self, model: nn.Module, inputs: Inputs) -> Results:
        """The same of a model that is float64 already."""
        doubled = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        with InFloat64():
            return self.results(model, doubled)


# Options that make a family compute gelu_tanh by torch's own function, as ours: other forms differ in the last bit.
TORCH_GELU_TANH = {
    "GPT-2": {"activation_function": "gelu_pytorch_tanh"},
    "Phi": {"hidden_act": "gelu_pytorch_tanh"},
    "T5 1.1": {"feed_forward_proj": "gated-gelu_pytorch_tanh"},
}


def blocks(entries: Sequence[fl.Entry]) -> list[fl.Entry]:
    """The entries of a report that are neither of the loss nor of norms."""
    others = ("rms_norm", "layer_norm", "its loss ")
    return [entry for entry in entries if entry.became != "FusedLossHead" and not entry.reason.startswith(others)]


class InFloat64(TorchFunctionMode):
    """Casts to float32 become casts to float64: norms and losses of these libraries ask for float32, whatever comes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth")
_ENCODER = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
}  # fmt: skip
_WORDS = {"vocab_size": WORDS, "max_position_embeddings": 64}
_DECODER = _ENCODER | _WORDS | {"num_key_value_heads": 1, "head_dim": WIDTH // HEADS}
_GPT2 = {
    "n_embd": WIDTH, "n_inner": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "vocab_size": WORDS,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_T5 = {
    "d_model": WIDTH, "d_ff": HIDDEN, "d_kv": WIDTH // HEADS, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": WORDS, "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "d_model": WIDTH, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "encoder_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_mel_bins": 8,
    "max_source_positions": 9, "max_target_positions": 32, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.1, "activation_dropout": 0.1,
}  # fmt: skip
_BART = {
    "d_model": WIDTH, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "encoder_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_position_embeddings": 64, "vocab_size": WORDS, "activation_dropout": 0.1,
}  # fmt: skip
_VISION = _ENCODER | {"image_size": 12, "patch_size": 4}
_TIMM_VIT = {"img_size": 12, "patch_size": 4, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS, "num_classes": 5}
_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 12, 20, WIDTH), "num_classes": 5}


def _text() -> Inputs:
    return {name: torch.randint(4, WORDS, (3, 11)) for name in ("input_ids", "labels")}


def _images(size: int = 12) -> Inputs:
    return {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.tensor([0, 2, 4])}


def _sound() -> Inputs:
    return {"input_features": torch.randn(3, 8, 18), "labels": torch.randint(4, WORDS, (3, 11))}


def _language_model(name: str) -> Family:
    return Family("transformers", f"{name}ForCausalLM", f"{name}Config", _DECODER, _text, (f"{name}MLP",))


def _masked(name: str) -> Family:
    return Family(
        "transformers", f"{name}ForMaskedLM", f"{name}Config", _ENCODER | _WORDS, _text, (f"{name}Layer",)
    )  # fmt: skip


def _classifier(name: str, **options: Any) -> Family:
    return Family(
        "transformers", f"{name}ForImageClassification", f"{name}Config", {"num_labels": 5} | options, _images,
        (f"{name}MLP",),
    )  # fmt: skip


def _t5(block: str, **options: str) -> Family:
    return Family(
        "transformers", "T5ForConditionalGeneration", "T5Config", _T5 | options, _text, (block,), 2 * LAYERS
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "Llama": _language_model("Llama"),
    "Mistral": _language_model("Mistral"),
    "Qwen2": _language_model("Qwen2"),
    "Qwen3": _language_model("Qwen3"),
    "Gemma": _language_model("Gemma"),
    "Gemma 2": _language_model("Gemma2"),
    "Gemma 3": Family("transformers", "Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER, _text, ("Gemma3MLP",)),
    "Phi": _language_model("Phi"),
    "GPT-2": Family("transformers", "GPT2LMHeadModel", "GPT2Config", _GPT2, _text, ("GPT2MLP",)),
    "GPT-NeoX": Family(
        "transformers", "GPTNeoXForCausalLM", "GPTNeoXConfig", _ENCODER | _WORDS, _text, ("GPTNeoXMLP",)
    ),
    "BERT": _masked("Bert"),
    "RoBERTa": _masked("Roberta"),
    "ELECTRA": _masked("Electra"),
    "T5": _t5("T5DenseActDense"),
    "T5 1.1": _t5("T5DenseGatedActDense", feed_forward_proj="gated-gelu"),
    "BART": Family(
        "transformers", "BartForConditionalGeneration", "BartConfig", _BART, _text,
        ("BartEncoderLayer", "BartDecoderLayer"), 2 * LAYERS,
    ),
    "Whisper": Family(
        "transformers", "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _sound,
        ("WhisperEncoderLayer", "WhisperDecoderLayer"), 2 * LAYERS,
    ),
    "ViT": _classifier("ViT", **_VISION, hidden_dropout_prob=0.1),
    "DeiT": _classifier("DeiT", **_VISION),
    "DINOv2": _classifier("Dinov2", **_VISION),
    "CLIP": _classifier("CLIP", vision_config=_VISION),
    "SigLIP": _classifier("Siglip", vision_config=_VISION | {"vision_use_head": False}),
    "timm ViT": Family("timm", "VisionTransformer", "timm.models.vision_transformer", _TIMM_VIT, _images, ("Mlp",)),
    "timm DeiT": Family("timm", "VisionTransformerDistilled", "timm.models.deit", _TIMM_VIT, _images, ("Mlp",)),
    "timm ConvNeXt": Family(
        "timm", "ConvNeXt", "timm.models.convnext", _CONVNEXT, lambda: _images(32), ("Mlp",), 4
    ),
}  # fmt: skip
