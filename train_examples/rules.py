"""What the value of a setting may be: a rule, in words and as a check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

import torch
from omegaconf import MISSING

from fusedlayers.functional.precision import WORDS


class SettingsError(ValueError):
    """An invalid setting: the message names it and its value, and says what was expected."""


class Rule(NamedTuple):
    """What a value must be, in words that follow "expected", and a check; NaN must fail every comparison."""

    expected: str
    holds: Callable[[Any], bool]


def one_of(*words: str) -> Rule:
    """The value is one of these words."""
    listed = f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
    return Rule(listed, lambda value: value in words)


def only_auto(reason: str) -> Rule:
    """The value must be ``auto``, because an example cannot use another one."""
    return Rule(f"auto: {reason}", lambda value: value == "auto")


def checked(rule: Rule, default: Any = MISSING) -> Any:
    """A setting with a rule."""
    return field(default=default, metadata={"rule": rule})


def accelerators() -> set[str]:
    """The values of ``run.accelerator`` that this machine has a device for."""
    found = {"auto", "cpu"}
    if torch.cuda.is_available():
        found |= {"cuda", "gpu"}
    if torch.backends.mps.is_available():
        found |= {"mps", "gpu"}
    return found


COUNT = Rule("1 or more", lambda value: value >= 1)
FINITE = Rule("a finite number", lambda value: math.isfinite(value))
THREADS = Rule("1 or more, or null", lambda value: value is None or value >= 1)
COUNT_OR_NONE = Rule("0 or more", lambda value: value >= 0)
NOT_NEGATIVE = Rule("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
ABOVE_ZERO = Rule("a number above 0 that is finite", lambda value: 0 < value < math.inf)
PART = Rule("a number between 0 and 1, both excluded", lambda value: 0 < value < 1)
BYTES = Rule("256 or more: one token for each byte", lambda value: value >= 256)
SHARE = Rule("a share in [0, 1)", lambda value: 0 <= value < 1)
PROBABILITY = Rule("a probability in [0, 1)", lambda value: 0 <= value < 1)
SEED = Rule("an integer that torch takes as a seed, -2**63 to 2**64 - 1", lambda value: -(2**63) <= value < 2**64)
FOLDER = Rule("the name of a folder", bool)
ACCELERATOR = Rule("auto, cpu, or a cuda, gpu or mps that this machine has", lambda value: value in accelerators())
PRECISION = one_of("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
# As in FusedFFN: 0 and 1 equal False and True, so they are not byte counts.
RECOMPUTE = Rule(
    "auto, true or false, or a number of bytes above 1",
    lambda value: value == "auto" or isinstance(value, bool) or (isinstance(value, int) and value > 1),
)
FLOAT8 = Rule(f"null, {', '.join(WORDS.values())}", lambda value: value is None or value in WORDS.values())
ONLY_NULL = Rule("null: there is no feed-forward block", lambda value: value is None)
