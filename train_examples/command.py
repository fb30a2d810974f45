"""What every example does with the configuration that Hydra composed: show it, run it, name what is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from train_examples.settings import Settings, SettingsError, as_settings

CONFIGS = str(Path(__file__).parents[1] / "configs")


def start(config: DictConfig, schema: type[Settings], run: Callable[[Settings], object]) -> None:
    """Print the configuration, whose keys Hydra has checked, and run the example that it describes."""
    with ExitStack() as stack:
        if int(os.environ.get("RANK", "0")):
            # Of the processes that torchrun starts, the first one speaks.
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        else:
            # One line of the library says which path its layers take on this machine, and why.
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("fusedlayers").setLevel(logging.INFO)
        print(OmegaConf.to_yaml(config, resolve=True))
        try:
            run(as_settings(config, schema))
        except SettingsError as error:
            raise SystemExit(f"error: {error}") from error
