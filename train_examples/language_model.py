"""A decoder-only Transformer on bytes: ``python -m train_examples.language_model layers=fused model=tiny``.

Pre-norm (Xiong et al. 2020), rotary positions (Su et al. 2021), the layout of GPT-2 otherwise. The only thing that
``layers=fused``, ``layers=torch`` and ``layers=replaced`` change is who computes the feed-forward blocks: parameters,
their first values, the batches and the checkpoint stay the same.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Literal, cast

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import fusedlayers
from fusedlayers.kernels.activations import ACTIVATIONS, canonical_activation
from fusedlayers.replacing import FFNRule
from train_examples import loop
from train_examples.data import fixed_windows, load_text, random_windows
from train_examples.settings import (
    LanguageModelSettings,
    LayerSettings,
    ModelSettings,
    SampleSettings,
    SettingsError,
    as_settings,
    register_settings,
)

# Bytes as tokens: no tokenizer to train or download, and every file is valid input.
VOCABULARY = 256


class FeedForward(nn.Module):
    """The feed-forward block in plain torch: ``down(act(up(x)))``, gated ``down(act(gate(x)) * up(x))``.

    ``x [*B, M, d_model]`` to the same shape. Children, their order and their first values are those of
    :class:`fusedlayers.FusedFFN`, so the same seed gives the same weights and checkpoints fit both.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str, gated: bool, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation = canonical_activation(activation)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        if gated:
            self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.gated = gated
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation].torch
        hidden = activate(self.gate_proj(x)) * self.up_proj(x) if self.gated else activate(self.up_proj(x))
        return self.down_proj(self.dropout(hidden))


# What layers=replaced tells fusedlayers about the class above; a user writes the same for a class of theirs.
FEED_FORWARD_RULE = FFNRule(
    FeedForward, up="up_proj", down="down_proj", activation="activation", gate="gate_proj", dropout="dropout"
)


class Attention(nn.Module):
    """Causal self-attention over ``x [B, M, d_model]`` with rotary positions."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


def rotary_tables(length: int, channels: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[length, channels / 2]`` of every position's angles, wavelengths from 2π to 2π · 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of channels of ``x [B, heads, M, channels]`` by its position's angle, so that a product of two
    rotated vectors depends on their distance alone."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return rotated.type_as(x)


class Block(nn.Module):
    """Attention, then the feed-forward block, each behind a norm and added to what came in."""

    def __init__(self, settings: ModelSettings, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(settings.d_model)
        self.attention = Attention(settings.d_model, settings.heads)
        self.feed_forward_norm = nn.LayerNorm(settings.d_model)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Tokens ``[B, M]`` (int64, M up to ``context``) to logits ``[B, M, 256]`` of the byte that follows each."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, settings: ModelSettings, layers: LayerSettings) -> None:
        super().__init__()
        check_model(settings, layers)
        self.embedding = nn.Embedding(VOCABULARY, settings.d_model)
        self.blocks = nn.ModuleList(Block(settings, feed_forward(settings, layers)) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.d_model)
        # Untied from the embedding: with 256 tokens a second table is cheap, and each finds its own scale.
        self.head = nn.Linear(settings.d_model, VOCABULARY, bias=False)
        for name, table in zip(
            ("cosine", "sine"), rotary_tables(settings.context, settings.d_model // settings.heads), strict=True
        ):
            self.register_buffer(name, table, persistent=False)
        self._scale_initial_weights(settings.layers)

    def _scale_initial_weights(self, layers: int) -> None:
        # nn.Linear's own draws already shrink with the width; what adds up over depth is the sum of all the branches.
        with torch.no_grad():
            self.embedding.weight.mul_(0.02)
            for name, parameter in self.named_parameters():
                if name.endswith(("out_proj.weight", "down_proj.weight")):
                    parameter.mul_(1 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


def feed_forward(model: ModelSettings, layers: LayerSettings) -> nn.Module:
    """The feed-forward block of one layer, of the kind that ``layers.kind`` names."""
    if layers.kind == "fused":
        recompute = cast("Literal['auto'] | bool", layers.recompute)
        return fusedlayers.FusedFFN(
            model.d_model, model.d_ff, model.activation, model.gated, model.bias, model.dropout, recompute
        )
    if layers.kind in ("torch", "replaced"):
        return FeedForward(model.d_model, model.d_ff, model.activation, model.gated, model.bias, model.dropout)
    raise SettingsError(f"layers.kind is {layers.kind!r}; expected fused, torch or replaced")


def build_model(model: ModelSettings, layers: LayerSettings) -> Transformer:
    """The Transformer; with ``layers=replaced`` it is built of torch layers and handed to ``fusedlayers.replace``."""
    transformer = Transformer(model, layers)
    if layers.kind == "replaced":
        print(fusedlayers.replace(transformer, rules=[FEED_FORWARD_RULE]))
    return transformer


def check_model(model: ModelSettings, layers: LayerSettings) -> None:
    """Every size at least 1, heads that divide the model into an even number of channels, and options that exist."""
    for name in ("d_model", "d_ff", "layers", "heads", "context"):
        if getattr(model, name) < 1:
            raise SettingsError(f"model.{name} is {getattr(model, name)}; expected 1 or more")
    if model.d_model % (2 * model.heads):
        raise SettingsError(
            f"model.d_model is {model.d_model} and model.heads is {model.heads}; "
            "expected d_model to be a multiple of 2 * heads: rotary positions turn pairs of channels"
        )
    if not 0 <= model.dropout < 1:
        raise SettingsError(f"model.dropout is {model.dropout}; expected a probability in [0, 1)")
    if layers.recompute not in ("auto", True, False):
        raise SettingsError(f"layers.recompute is {layers.recompute!r}; expected auto, true or false")
    try:
        canonical_activation(model.activation)
    except ValueError as error:
        raise SettingsError(f"model.activation: {error}") from error


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy, in nats per byte, of every byte of the windows ``[B, M + 1]`` but the first."""
    (windows,) = batch
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def generate(model: nn.Module, settings: SampleSettings, context: int, seed: int) -> str:
    """The prompt and ``settings.length`` bytes drawn one after the other, always from the same seed."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(settings.prompt.encode())], device=device)
    for _ in range(settings.length):
        logits = model(tokens[:, -context:])[0, -1].float().cpu()
        choice = torch.multinomial(torch.softmax(logits / settings.temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, choice[None].to(device)), dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    # A young model writes control bytes too, which a terminal would obey.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def run(settings: LanguageModelSettings) -> loop.Row:
    """Load the text, build the model, train it; returns the summary that is also in ``summary.json``."""
    model, data = settings.model, settings.data
    length = model.context + 1  # a window holds the inputs and, shifted by one, their targets
    if not settings.sample.prompt:
        raise SettingsError("sample.prompt is empty; expected at least one byte to continue from")
    if settings.sample.temperature <= 0:
        raise SettingsError(f"sample.temperature is {settings.sample.temperature}; expected a number above 0")
    text = load_text(data, length)
    print(text.description)
    torch.manual_seed(settings.run.seed)
    transformer = build_model(model, settings.layers)
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    print(f"{parameters:,} parameters, layers={settings.layers.kind}")
    validation = fixed_windows(text.validation, settings.run.evaluation_batches * settings.run.batch_size, length)
    architecture = ("d_model", "d_ff", "layers", "heads", "activation", "gated", "bias")
    example = loop.Example(
        name="language_model",
        model=transformer,
        fingerprint={f"model.{name}": getattr(model, name) for name in architecture},
        training_batch=lambda generator: (random_windows(text.training, settings.run.batch_size, length, generator),),
        validation_batches=[(batch,) for batch in validation.split(settings.run.batch_size)],
        loss=next_byte_loss,
        tokens_per_batch=settings.run.batch_size * model.context,
        sample=lambda trained: generate(trained, settings.sample, model.context, settings.run.seed),
    )
    config = OmegaConf.to_yaml(OmegaConf.structured(settings))
    return loop.train(example, settings.layers.kind, settings.run, settings.optim, config)


register_settings()


@hydra.main(version_base="1.3", config_path=str(Path(__file__).parents[1] / "configs"), config_name="language_model")
def main(config: DictConfig) -> None:
    """Entry point: Hydra has checked every key by now; print the configuration and run it."""
    print(OmegaConf.to_yaml(config, resolve=True))
    # One line of the library says which path its blocks take on this machine, and why.
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("fusedlayers").setLevel(logging.INFO)
    try:
        run(as_settings(config))
    except SettingsError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
