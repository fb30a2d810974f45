"""What two runs of the language model will show on this machine, said before they start, as by ``make train``.

    python -m train_examples.opening model=tiny run.directory=runs

takes the settings of the runs; ``run.directory`` is the folder in which both lie, ``torch`` and ``fused``.
"""

from __future__ import annotations

import statistics
import textwrap
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

import fusedlayers
from train_examples.checkpoints import newest
from train_examples.command import CONFIGS, checked_settings, in_one_line
from train_examples.language_model import build_model, next_token_loss
from train_examples.loop import choose_precision
from train_examples.settings import LanguageModelSettings, LayerSettings, register_settings
from train_examples.transformer import feed_forward

# Of a run, beside its steps: imports, evaluation, the sample and the pictures.
AROUND_SECONDS = 20
TIMED_STEPS = 5


def opening(settings: LanguageModelSettings) -> str:
    """One paragraph: the machine, what is compared on it, how long that takes, and what becomes of earlier runs."""
    run, model = settings.run, settings.model
    use_gpu = run.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    tokens = run.batch_size * model.context
    sentences = [
        f"A language model (model={model.name}) is trained twice for {run.steps:,} steps of {tokens:,} tokens, with "
        "torch.nn layers and with fused layers, and the runs are compared."
    ]
    if use_gpu:
        what = plan_in_words(settings, device)
        name = torch.cuda.get_device_name(device)
        sentences.append(f"The GPU here is {name}; a fused feed-forward block {what[0].lower()}{what[1:]}")
        sentences.append("The end compares loss, speed and peak memory.")
    else:
        sentences.append(
            "PyTorch finds no CUDA or ROCm GPU on this machine, so its operations compute both, the fused layers with "
            "recompute=True: the losses will show that these train as torch's do, and the end how much less they keep "
            "for the backward pass. It adds the speed and memory that a GPU showed."
        )
    sentences.append(f"This takes {duration(2 * (run.steps * seconds_per_step(settings, device) + AROUND_SECONDS))}.")
    folders = [Path(run.directory) / name for name in ("torch", "fused")]
    earlier = [str(folder) for folder in folders if newest(folder) is not None]
    if earlier:
        verb = "goes on with" if run.resume == "auto" else "overwrites"
        sentences.append(f"It {verb} the earlier runs in {' and '.join(earlier)}.")
    return " ".join(sentences)


def plan_in_words(settings: LanguageModelSettings, device: torch.device) -> str:
    """What runs a feed-forward block in a training step, in one sentence of ``explain``."""
    model = settings.model
    dtype = torch.bfloat16 if choose_precision(settings.run).startswith("bf16") else torch.float32
    layer = feed_forward(model, LayerSettings("fused", settings.layers.recompute)).to(device, dtype)
    x = torch.empty(settings.run.batch_size, model.context, model.d_model, device=device, dtype=dtype)
    return fusedlayers.explain(layer, x.requires_grad_()).splitlines()[0]


def seconds_per_step(settings: LanguageModelSettings, device: torch.device) -> float:
    """The time of a step of torch's layers without the optimizer, measured on a few of them."""
    classes = settings.vocabulary.size
    built = build_model(settings.model, LayerSettings("torch"), classes).to(device)
    windows = torch.randint(classes, (settings.run.batch_size, settings.model.context + 1), device=device)
    mixed = choose_precision(settings.run) == "bf16-mixed"
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = next_token_loss(built, (windows,))
        loss.backward()
        loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    # The first one warms up.
    return statistics.median(seconds[1:])


def duration(seconds: float) -> str:
    """Roughly how long that is, in words."""
    minutes = round(seconds / 60)
    if minutes <= 1:
        return "about a minute"
    return f"about {minutes} minutes" if minutes < 120 else f"about {round(seconds / 3600)} hours"


register_settings()


@in_one_line
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="language_model")
def main(config: DictConfig) -> None:
    """Entry point."""
    text = opening(checked_settings(config, LanguageModelSettings))
    # Paths stay whole.
    print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    main()
