"""A decoder-only Transformer: ``python -m train_examples.language_model layers=fused model=tiny``.

GPT-2's layout with rotary positions. The block, and what ``layers`` changes in it, are in ``transformer.py``, the
tokens in ``tokens.py``. ``loss`` selects who computes the last linear layer together with its loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers
from train_examples import loop
from train_examples.command import CONFIGS, in_one_line, start
from train_examples.data import fixed_windows, load_text, random_windows
from train_examples.settings import (
    LanguageModelSettings,
    LayerSettings,
    LossSettings,
    ModelSettings,
    SampleSettings,
    register_settings,
)
from train_examples.tokens import BYTES, Tokens, tokenized
from train_examples.transformer import Transformer, replace_if_asked

# The control.
TORCH = LossSettings("torch")


class TorchLoss(nn.Module):
    """The loss head in plain torch: logits of all tokens, and their cross-entropy in float32 or wider.

    Its child and initial values are those of :class:`fusedlayers.LinearCrossEntropyLoss`, so checkpoints fit both.
    """

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x).flatten(0, -2)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target.flatten())


class LanguageModel(Transformer):
    """Maps tokens ``[B, M]`` (int64, M up to ``context``) to the logits ``[B, V]`` of the token after the last one.

    With ``targets [B, M]``, returns their mean cross-entropy instead, in nats.
    """

    def __init__(self, settings: ModelSettings, layers: LayerSettings, vocabulary: int, loss: LossSettings) -> None:
        super().__init__(settings, layers, vocabulary, causal=True, embedding_scale=0.02)
        # Not tied to the embedding: each finds its own scale.
        self.head: nn.Module = (
            fusedlayers.LinearCrossEntropyLoss(settings.d_model, vocabulary, recompute=loss.recompute)
            if loss.kind == "fused"
            else TorchLoss(settings.d_model, vocabulary)
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.features(tokens)
        return self.logits(x[:, -1]) if targets is None else self.head(x, targets)

    def logits(self, x: Tensor) -> Tensor:
        """The logits ``[*B, V]`` of vectors ``[*B, d_model]``, gathered if the classes are sharded over processes."""
        linear: Any = self.head.linear
        if isinstance(linear.weight, DTensor):
            x = DTensor.from_local(x, linear.weight.device_mesh, [Replicate()], run_check=False)
        found = linear(x)
        return found.full_tensor() if isinstance(found, DTensor) else found


def build_model(
    model: ModelSettings,
    layers: LayerSettings,
    vocabulary: int = BYTES.size,
    loss: LossSettings = TORCH,
) -> LanguageModel:
    """The language model, with feed-forward blocks and loss head of the kinds in ``layers`` and ``loss``."""
    built = LanguageModel(model, layers, vocabulary, loss)
    replace_if_asked(built, layers)
    return built


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross-entropy, in nats per token, of every token of the windows ``[B, M + 1]`` except the first."""
    (windows,) = batch
    return model(windows[:, :-1], windows[:, 1:])


def flops_per_token(model: ModelSettings, vocabulary: int = BYTES.size) -> float:
    """Floating-point operations, forward and backward, per token of a training window of ``model.context``.

    Counts the matrix products of the model whoever computes them, not what a kernel recomputes or skips. Attention
    counts in full, as usual (Chowdhery et al. 2022, appendix B), also if it is causal.
    """
    if model.experts:
        # Per token: a block as wide as its experts together, and the router.
        dense = dataclasses.replace(model, experts=0, d_ff=model.d_ff * model.experts_per_token)
        return flops_per_token(dense, vocabulary) + 6 * model.layers * model.d_model * model.experts
    # The meta device computes only shapes. All kinds of layers have the same arithmetic as torch's.
    with torch.device("meta"):
        built = build_model(model, LayerSettings("torch"), vocabulary)
        window = torch.empty(1, model.context + 1, dtype=torch.int64)
    # The formulas of other attention backends include the scores that these recompute.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(built, (window,)).backward()
    return counter.get_total_flops() / model.context


@torch.no_grad()
def generate(model: nn.Module, settings: SampleSettings, context: int, seed: int, vocabulary: Tokens = BYTES) -> str:
    """The prompt and ``settings.length`` tokens sampled one by one, always from the same seed."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([vocabulary.encode(settings.prompt)], device=device)
    for _ in range(settings.length):
        following = model(tokens[:, -context:])[0].float().cpu()
        choice = torch.multinomial(torch.softmax(following / settings.temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, choice[None].to(device)), dim=1)
    text = vocabulary.decode(tokens[0].tolist())
    # A model early in training writes control bytes, too, which a terminal would obey.
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def run(settings: LanguageModelSettings) -> loop.Row:
    """Load the text, build the model, train it; returns the summary that is also in ``summary.json``."""
    model, data = settings.model, settings.data
    length = model.context + 1  # a window holds the inputs and, shifted by one, their targets
    text, vocabulary = tokenized(load_text(data, length), settings.vocabulary, length)
    print(text.description)
    torch.manual_seed(settings.run.seed)
    built = build_model(model, settings.layers, vocabulary.size, settings.loss)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    print(f"{parameters:,} parameters, layers={settings.layers.kind}, loss={settings.loss.kind}")
    validation = fixed_windows(text.validation, settings.run.evaluation_batches * settings.run.batch_size, length)
    architecture = ["d_model", "d_ff", "layers", "heads", "activation", "gated", "bias"]
    architecture += ["experts", "experts_per_token"] if model.experts else []
    fingerprint = {f"model.{name}": getattr(model, name) for name in architecture}
    if vocabulary.digest is not None:
        fingerprint["vocabulary"] = vocabulary.digest

    def sample(trained: nn.Module) -> tuple[str, loop.Row]:
        written = generate(trained, settings.sample, model.context, settings.run.seed, vocabulary)
        return written, {"vocabulary": vocabulary.size, "loss": settings.loss.kind}

    example = loop.Example(
        name="language_model",
        model=built,
        fingerprint=fingerprint,
        training_batch=lambda generator: (random_windows(text.training, settings.run.batch_size, length, generator),),
        validation_batches=[(batch,) for batch in validation.split(settings.run.batch_size)],
        loss=next_token_loss,
        loss_unit=f"nats per {vocabulary.token}",
        tokens_per_batch=settings.run.batch_size * model.context,
        sample=sample,
        flops_per_token=flops_per_token(model, vocabulary.size),
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
