"""What the tests of the examples share: a run of seconds, and what it wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from hydra import compose, initialize_config_dir

from train_examples import language_model, loop
from train_examples.settings import LanguageModelSettings, as_settings

ROOT = Path(__file__).resolve().parents[1]
# Real text that every Python brings, small enough to be read in no time.
TEXT = argparse.__file__

TINY = (
    "data=text_file",
    f"data.path={TEXT}",
    "model.d_model=32",
    "model.d_ff=64",
    "model.layers=2",
    "model.heads=2",
    "model.context=32",
    "optim.warmup_steps=2",
    "run.batch_size=4",
    "run.steps=12",
    "run.log_every=2",
    "run.evaluate_every=4",
    "run.evaluation_batches=2",
    "run.checkpoint_every=4",
    "run.accelerator=cpu",
    "sample.length=20",
)


def settings(directory: Path, *overrides: str) -> LanguageModelSettings:
    """The configuration of a run of seconds, with further overrides as they are typed on the command line."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("language_model", [*TINY, f"run.directory={directory}", *overrides])
    return as_settings(config, LanguageModelSettings)


def train(directory: Path, *overrides: str) -> list[loop.Row]:
    """Run the example and return the rows of its metrics."""
    language_model.run(settings(directory, *overrides))
    return loop.read_metrics(directory / "metrics.jsonl")
