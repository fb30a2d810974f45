"""A decoder-only Transformer on bytes: ``python -m train_examples.language_model layers=fused model=tiny``.

The layout of GPT-2 with rotary positions; the block, and what ``layers`` changes in it, are in ``transformer.py``.
"""

from __future__ import annotations

import dataclasses

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from train_examples import loop
from train_examples.command import CONFIGS, in_one_line, start
from train_examples.data import fixed_windows, load_text, random_windows
from train_examples.settings import (
    LanguageModelSettings,
    LayerSettings,
    ModelSettings,
    SampleSettings,
    register_settings,
)
from train_examples.transformer import Transformer, replace_if_asked

# Bytes as tokens: no tokenizer to train or download, and every file is valid input.
VOCABULARY = 256


class LanguageModel(Transformer):
    """Tokens ``[B, M]`` (int64, M up to ``context``) to logits ``[B, M, 256]`` of the byte that follows each."""

    def __init__(self, settings: ModelSettings, layers: LayerSettings) -> None:
        super().__init__(settings, layers, VOCABULARY, causal=True, embedding_scale=0.02)
        # Untied from the embedding: with 256 tokens a second table is cheap, and each finds its own scale.
        self.head = nn.Linear(settings.d_model, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def build_model(model: ModelSettings, layers: LayerSettings) -> LanguageModel:
    """The language model, its feed-forward blocks of the kind that ``layers.kind`` names."""
    built = LanguageModel(model, layers)
    replace_if_asked(built, layers)
    return built


def next_byte_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy, in nats per byte, of every byte of the windows ``[B, M + 1]`` but the first."""
    (windows,) = batch
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def flops_per_token(model: ModelSettings) -> float:
    """Floating-point operations, forward and backward, of one token of a training window of ``model.context``.

    Of the matrix products that the model is made of, whoever computes them: what a kernel computes again or leaves out
    is not looked at. Attention counts in full, as usual (Chowdhery et al. 2022, appendix B), also where it is causal.
    """
    if model.experts:
        # Each token has the arithmetic of a block as wide as its experts together, and the router's.
        dense = dataclasses.replace(model, experts=0, d_ff=model.d_ff * model.experts_per_token)
        return flops_per_token(dense) + 6 * model.layers * model.d_model * model.experts
    # On the meta device shapes alone are computed. Every kind of layers has the arithmetic of torch's.
    with torch.device("meta"):
        built = LanguageModel(model, LayerSettings("torch"))
        window = torch.empty(1, model.context + 1, dtype=torch.int64)
    # The formulas of other backends count the scores that these compute again.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_byte_loss(built, (window,)).backward()
    return counter.get_total_flops() / model.context


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
    text = load_text(data, length)
    print(text.description)
    torch.manual_seed(settings.run.seed)
    built = build_model(model, settings.layers)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    print(f"{parameters:,} parameters, layers={settings.layers.kind}")
    validation = fixed_windows(text.validation, settings.run.evaluation_batches * settings.run.batch_size, length)
    architecture = ["d_model", "d_ff", "layers", "heads", "activation", "gated", "bias"]
    architecture += ["experts", "experts_per_token"] if model.experts else []
    example = loop.Example(
        name="language_model",
        model=built,
        fingerprint={f"model.{name}": getattr(model, name) for name in architecture},
        training_batch=lambda generator: (random_windows(text.training, settings.run.batch_size, length, generator),),
        validation_batches=[(batch,) for batch in validation.split(settings.run.batch_size)],
        loss=next_byte_loss,
        loss_unit="nats per byte",
        tokens_per_batch=settings.run.batch_size * model.context,
        sample=lambda trained: (generate(trained, settings.sample, model.context, settings.run.seed), {}),
        flops_per_token=flops_per_token(model),
    )
    config = OmegaConf.to_yaml(OmegaConf.structured(settings))
    return loop.train(example, settings.layers.kind, settings.run, settings.optim, config, settings.parallel.kind)


register_settings()


@in_one_line
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="language_model")
def main(config: DictConfig) -> None:
    """Entry point."""
    start(config, LanguageModelSettings, run)


if __name__ == "__main__":
    main()
