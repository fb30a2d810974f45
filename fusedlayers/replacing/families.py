"""The model families that `replace` knows: one row for each class, known by where it is imported from.

Nothing is imported for that. A new family is a new row; ``tests/models`` holds a small model of each, and makes the
README's table of support from them.
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


FAMILIES: dict[str, FFNRule] = {
    rule.class_path: rule
    for rule in (
        _gated("transformers.models.llama.modeling_llama.LlamaMLP"),
        _gated("transformers.models.mistral.modeling_mistral.MistralMLP"),
        _gated("transformers.models.qwen2.modeling_qwen2.Qwen2MLP"),
        _gated("transformers.models.qwen3.modeling_qwen3.Qwen3MLP"),
        _gated("transformers.models.gemma.modeling_gemma.GemmaMLP"),
        _gated("transformers.models.gemma2.modeling_gemma2.Gemma2MLP"),
        FFNRule(
            "transformers.models.gpt2.modeling_gpt2.GPT2MLP",
            up="c_fc", down="c_proj", activation="act", output_dropout="dropout",
        ),
        _bert_layer("transformers.models.bert.modeling_bert.BertLayer"),
        _bert_layer("transformers.models.roberta.modeling_roberta.RobertaLayer"),
        _two_linears("transformers.models.vit.modeling_vit.ViTMLP"),
        FFNRule(
            "transformers.models.t5.modeling_t5.T5DenseActDense",
            up="wi", down="wo", activation="act", dropout="dropout",
        ),
        FFNRule(
            "transformers.models.t5.modeling_t5.T5DenseGatedActDense",
            up="wi_1", gate="wi_0", down="wo", activation="act", dropout="dropout",
        ),
        *(
            _two_linears(
                f"transformers.models.whisper.modeling_whisper.Whisper{side}Layer",
                inside="forward", dropout="activation_dropout",
            )
            for side in ("Encoder", "Decoder")
        ),
        FFNRule(
            "timm.layers.mlp.Mlp", up="fc1", down="fc2", activation="act", dropout="drop1", output_dropout="drop2"
        ),
    )
}  # fmt: skip
