"""Where the random numbers of the suite start: at 0, or for ``FUSEDLAYERS_TEST_SEED=7`` at other numbers everywhere.

A test that holds for one seed alone proves little. This one variable moves the seed that every test starts from, what
test files draw when they are imported, and every seed that a test names itself.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

SEED = int(os.environ.get("FUSEDLAYERS_TEST_SEED", "0"))
# Tests name seeds of one or two digits, which must not meet those of another start.
_APART = 1_000_003


def move_seeds() -> None:
    """From here on ``torch.manual_seed`` counts from where this run starts: tests call it as users do."""
    # Without CUDA torch's own function would keep the stack of every call for each kind of device that is not there.
    manual_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

    def moved(seed: int) -> torch.Generator:
        return manual_seed(_moved(seed))

    torch.manual_seed = moved


def start_over(seed: int = 0) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU."""
    random.seed(_moved(seed))
    np.random.seed(_moved(seed) % 2**32)  # noqa: NPY002  code under test may draw from the global generator
    # Not torch.manual_seed, which seeds CUDA devices, too: see start_over_on_gpus.
    torch.default_generator.manual_seed(_moved(seed))


def start_over_on_gpus() -> None:
    """Seed the generators of all CUDA devices."""
    torch.cuda.manual_seed_all(_moved(0))


def generator(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of a test's own."""
    return torch.Generator(device).manual_seed(_moved(seed))


def _moved(seed: int) -> int:
    return seed + SEED * _APART
