"""Announces what two runs of the language model will show on this machine, before ``make train`` starts them.

    python -m train_examples.opening model=tiny run.directory=runs

takes the settings of the runs; ``run.directory`` is the folder of both, ``torch`` and ``fused``. The settings that suit
this machine are written into a file there, for both runs.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

import fusedlayers
from train_examples.checkpoints import newest, steps_done
from train_examples.command import CONFIGS, INTERRUPTED, checked_settings, in_one_line
from train_examples.language_model import build_model, next_token_loss
from train_examples.loop import choose_precision
from train_examples.rules import SettingsError
from train_examples.settings import LanguageModelSettings, LayerSettings, register_settings
from train_examples.transformer import feed_forward

# Seconds of a run outside its steps: imports, evaluation, the sample and the pictures.
AROUND_SECONDS = 20
# The number of steps timed with each number of threads, and the seconds after which no more are started.
TIMED_STEPS = 5
TRIAL_SECONDS = 20.0
# The file with the settings that suit the machine.
SUITABLE = "settings.txt"


def opening(settings: LanguageModelSettings) -> tuple[str, list[str]]:
    """One paragraph (the machine, what is compared, how long it takes, what becomes of earlier runs), and the settings
    for both runs on this machine.

    Raises:
        SettingsError: a run is to be resumed from something that is not a checkpoint.
    """
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
        # Only the launching thread matters.
        trial = seconds_per_step(settings, device, [1])
        suitable = ["layers.recompute=auto"]
    else:
        sentences.append(
            "PyTorch finds no CUDA or ROCm GPU on this machine, so its operations compute both, the fused layers with "
            "recompute=True: the losses will show that these train as torch's do, and the end how much less they keep "
            "for the backward pass. It adds the speed and memory that a GPU showed."
        )
        trial = seconds_per_step(settings, device, sorted({1, torch.get_num_threads()}))
        suitable = ["layers.recompute=true", f"run.threads={fastest(trial)}"]
        if len(trial) > 1:
            sentences.append(threads_in_words(trial))
    earlier = [folder for name in ("torch", "fused") if newest(folder := Path(run.directory) / name) is not None]
    done = {folder: steps_done(folder) for folder in earlier if run.resume == "auto"}
    steps = 2 * run.steps - sum(min(run.steps, each) for each in done.values())
    sentences.append(f"This takes {duration(steps * min(trial.values()) + 2 * AROUND_SECONDS)}.")
    for folder, each in done.items():
        what = "is finished and stays" if each >= run.steps else f"goes on after step {each:,}"
        sentences.append(f"The run in {folder} {what}.")
    if earlier and not done:
        sentences.append(f"It overwrites the earlier runs in {' and '.join(map(str, earlier))}.")
    return " ".join(sentences), suitable


def fastest(trial: Mapping[int, float]) -> int:
    """The number of threads with the fastest steps."""
    return min(trial, key=lambda threads: trial[threads])


def threads_in_words(trial: Mapping[int, float]) -> str:
    """The chosen number of threads, and the time of a step with each number that was tried, in one sentence."""

    def counted(threads: int) -> str:
        return f"{threads:,} thread{'s' if threads > 1 else ''}"

    times = [f"{1e3 * seconds:,.0f} ms with {counted(threads)}" for threads, seconds in trial.items()]
    return f"Both runs use {counted(fastest(trial))}, because here a step takes {' and '.join(times)}."


def plan_in_words(settings: LanguageModelSettings, device: torch.device) -> str:
    """What runs a feed-forward block in a training step, as ``explain`` says in one sentence."""
    model = settings.model
    dtype = torch.bfloat16 if choose_precision(settings.run).startswith("bf16") else torch.float32
    layer = feed_forward(model, LayerSettings("fused", settings.layers.recompute)).to(device, dtype)
    x = torch.empty(settings.run.batch_size, model.context, model.d_model, device=device, dtype=dtype)
    return str(fusedlayers.explain(layer, x.requires_grad_()).lines[0])


def seconds_per_step(settings: LanguageModelSettings, device: torch.device, threads: Iterable[int]) -> dict[int, float]:
    """Seconds of a step with torch's layers, without the optimizer, by number of threads, measured on a few steps."""
    classes = settings.vocabulary.size
    built = build_model(settings.model, LayerSettings("torch"), classes).to(device)
    windows = torch.randint(classes, (settings.run.batch_size, settings.model.context + 1), device=device)
    mixed = choose_precision(settings.run) == "bf16-mixed"
    seconds: dict[int, list[float]] = {number: [] for number in threads}
    begin, before = time.perf_counter(), torch.get_num_threads()
    for _ in range(1 + TIMED_STEPS):
        # Interleaved, so that other load on the machine affects all numbers alike.
        for number, found in seconds.items():
            torch.set_num_threads(number)
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                loss = next_token_loss(built, (windows,))
            loss.backward()
            loss.item()  # waits for the GPU
            found.append(time.perf_counter() - start)
        if time.perf_counter() - begin > TRIAL_SECONDS:
            break
    torch.set_num_threads(before)
    # The first step is warm-up; it counts only if it took so long that no other ran.
    return {number: statistics.median(found[1:] or found) for number, found in seconds.items()}


def duration(seconds: float) -> str:
    """A duration in words, roughly."""
    minutes = round(seconds / 60)
    if minutes <= 1:
        return "about a minute"
    return f"about {minutes} minutes" if minutes < 120 else f"about {round(seconds / 3600)} hours"


register_settings()


@in_one_line
@hydra.main(version_base="1.3", config_path=CONFIGS, config_name="language_model")
def main(config: DictConfig) -> None:
    """Entry point."""
    settings = checked_settings(config, LanguageModelSettings)
    try:
        text, suitable = opening(settings)
    except SettingsError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        print("\ninterrupted before the runs began", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    # Do not break paths.
    print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False))
    folder = Path(settings.run.directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUITABLE).write_text(" ".join(suitable) + "\n")


if __name__ == "__main__":
    main()
