"""The Transformer block that the examples share: pre-norm (Xiong et al. 2020), rotary positions (Su et al. 2021).

``layers=fused``, ``layers=torch`` and ``layers=replaced`` change only who computes the feed-forward blocks: parameters,
their initial values, batches and checkpoints stay the same.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers
from fusedlayers.kernels.activations import ACTIVATIONS, canonical_activation
from fusedlayers.replacing import FFNRule
from train_examples.mixture import Mixture
from train_examples.settings import LayerSettings, ModelSettings


class FeedForward(nn.Module):
    """The feed-forward block in plain torch: ``down(act(up(x)))``, gated ``down(act(gate(x)) * up(x))``.

    ``x [*B, M, d_model]`` to the same shape. Children, their order and initial values are those of
    :class:`fusedlayers.FusedFFN`, so the same seed gives the same weights and checkpoints fit both.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str, gated: bool, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[canonical_activation(activation)].torch
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        if gated:
            self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.gated = gated
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        hidden = self.activate(self.gate_proj(x)) * up if self.gated else self.activate(up)
        return self.down_proj(self.dropout(hidden))


# The rule of layers=replaced for the class above; users write the same for their classes.
FEED_FORWARD_RULE = FFNRule(
    FeedForward, up="up_proj", down="down_proj", activation="activate", gate="gate_proj", dropout="dropout"
)


class Attention(nn.Module):
    """Self-attention over ``x [B, M, d_model]`` with rotary positions, causal or in both directions.

    ``attended [B, M]`` (boolean, only without ``causal``) is False for padding, which no token attends to.
    """

    def __init__(self, d_model: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attended: Tensor | None = None) -> Tensor:
        projected = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1))
        # Queries and keys are rotated together. Split this way, the gradients of all three are joined in one copy.
        turned, value = projected.split((2, 1), dim=-3)
        query, key = rotate(turned, cosine, sine).unbind(-3)
        mask = None if attended is None else attended[:, None, None, :]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value.squeeze(-3)))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


def rotary_tables(length: int, channels: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[length, channels / 2]`` of every position's angles, wavelengths from 2π to 2π · 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of channels of ``x [B, M, *, heads, channels]`` by its position's angle, so that the dot product
    of two rotated vectors depends only on their distance. Computes in the dtype of x."""
    cosine, sine = (table[:, None, None].to(x.dtype) for table in (cosine, sine))
    first, second = x.chunk(2, dim=-1)
    real = torch.addcmul(first * cosine, second, sine, value=-1)
    imaginary = torch.addcmul(first * sine, second, cosine)
    return torch.cat((real, imaginary), dim=-1)


class Block(nn.Module):
    """Attention, then the feed-forward block, each with a pre-norm and a residual connection."""

    def __init__(self, settings: ModelSettings, feed_forward: nn.Module, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.d_model)
        self.attention = Attention(settings.d_model, settings.heads, causal)
        self.feed_forward_norm = nn.LayerNorm(settings.d_model)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attended: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine, attended)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Embedding, blocks and a final norm: tokens ``[B, M]`` (int64, M up to ``context``) to ``[B, M, d_model]``.

    Examples derive from it and add their heads.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self, settings: ModelSettings, layers: LayerSettings, vocabulary: int, *, causal: bool, embedding_scale: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, settings.d_model)
        self.blocks = nn.ModuleList(
            Block(settings, feed_forward(settings, layers), causal) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(settings.d_model)
        tables = rotary_tables(settings.context, settings.d_model // settings.heads)
        for name, table in zip(("cosine", "sine"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        self._scale_initial_weights(settings.layers, embedding_scale)

    def _scale_initial_weights(self, layers: int, embedding_scale: float) -> None:
        # nn.Linear's initialisation already shrinks with the width; scale the branches, whose sum grows with depth.
        with torch.no_grad():
            self.embedding.weight.mul_(embedding_scale)
            for name, parameter in self.named_parameters():
                if name.endswith(("out_proj.weight", "down_proj.weight", "experts.down_proj")):
                    parameter.mul_(1 / math.sqrt(2 * layers))

    def features(self, tokens: Tensor, attended: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """The vector ``[B, M, d_model]`` of every token, given those that it may attend to; ``added [d_model]`` is
        added to every embedding."""
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        x = self.embedding(tokens)
        if added is not None:
            x = x + added
        for block in self.blocks:
            x = block(x, cosine, sine, attended)
        return self.norm(x)


def feed_forward(model: ModelSettings, layers: LayerSettings) -> nn.Module:
    """The feed-forward block of one layer, of the kind ``layers.kind``, or the mixture of experts."""
    if model.experts:
        sizes = (model.d_model, model.d_ff, model.experts, model.experts_per_token, model.activation, model.gated)
        if layers.kind == "fused":
            return fusedlayers.FusedMoE(*sizes, recompute=layers.recompute is True)
        return Mixture(*sizes)
    if layers.kind == "fused":
        return fusedlayers.FusedFFN(
            model.d_model, model.d_ff, model.activation, model.gated, model.bias, model.dropout, recompute(layers),
            precision=layers.precision,
        )  # fmt: skip
    return FeedForward(model.d_model, model.d_ff, model.activation, model.gated, model.bias, model.dropout)


def replace_if_asked(model: nn.Module, layers: LayerSettings) -> None:
    """With ``layers=replaced``, pass a model of torch layers to ``fusedlayers.replace``."""
    if layers.kind == "replaced":
        # A model with experts has no block of this class, and the report would list the rule as unused.
        rules = [FEED_FORWARD_RULE] if any(type(module) is FeedForward for module in model.modules()) else []
        print(fusedlayers.replace(model, rules=rules, recompute=recompute(layers), precision=layers.precision))


def recompute(layers: LayerSettings) -> Literal["auto"] | bool | int:
    """``layers.recompute``, checked by :mod:`train_examples.settings`, in the library's type."""
    return cast("Literal['auto'] | bool | int", layers.recompute)
