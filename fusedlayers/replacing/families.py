"""The model families that `replace` knows: one row for each class, known by where it is imported from.

Nothing is imported for that. A new family is a new row; ``tests/models`` holds a small model of each, and makes the
table of support in docs/models.md from them.
"""

from __future__ import annotations

from .rules import FFNRule


def _gated(name: str) -> FFNRule:
    """A Llama-like block."""
    return FFNRule(name, up="up_proj", gate="gate_proj", down="down_proj", activation="act_fn")


def _bert_layer(name: str) -> FFNRule:
    """A BERT-like layer ``package.module.NameLayer``: its FFN lies in two children, with a residual and a norm."""
    prefix = name.removesuffix("Layer")
    return FFNRule(
        name, up="intermediate.dense", activation="intermediate.intermediate_act_fn", down="output.dense",
        inside="feed_forward_chunk",
        holders=(("intermediate", f"{prefix}Intermediate"), ("output", f"{prefix}Output")),
    )  # fmt: skip


def _two_linears(name: str, inside: str | None = None, dropout: str | None = None) -> FFNRule:
    """A block or layer with the names that transformers gives to two linears and their activation."""
    return FFNRule(name, up="fc1", down="fc2", activation="activation_fn", inside=inside, dropout=dropout)


def _transformers(model: str, name: str) -> str:
    return f"transformers.models.{model}.modeling_{model}.{name}"


FAMILIES: dict[str, FFNRule] = {
    rule.class_path: rule
    for rule in (
        *(
            _gated(_transformers(name.lower(), f"{name}MLP"))
            for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
        ),
        *(
            _two_linears(_transformers(name.lower(), f"{name}MLP"))
            for name in ("CLIP", "DeiT", "Dinov2", "Phi", "Siglip", "ViT")
        ),
        *(_bert_layer(_transformers(name.lower(), f"{name}Layer")) for name in ("Bert", "Electra", "Roberta")),
        *(
            _two_linears(_transformers(name.lower(), f"{name}{side}Layer"), "forward", "activation_dropout")
            for name in ("Bart", "Whisper")
            for side in ("Encoder", "Decoder")
        ),
        FFNRule(
            _transformers("gpt2", "GPT2MLP"), up="c_fc", down="c_proj", activation="act", output_dropout="dropout"
        ),
        FFNRule(
            _transformers("gpt_neox", "GPTNeoXMLP"), up="dense_h_to_4h", down="dense_4h_to_h", activation="act"
        ),
        FFNRule(
            _transformers("t5", "T5DenseActDense"), up="wi", down="wo", activation="act", dropout="dropout"
        ),
        FFNRule(
            _transformers("t5", "T5DenseGatedActDense"),
            up="wi_1", gate="wi_0", down="wo", activation="act", dropout="dropout",
        ),
        FFNRule(
            "timm.layers.mlp.Mlp", up="fc1", down="fc2", activation="act", dropout="drop1", output_dropout="drop2"
        ),
    )
}  # fmt: skip
