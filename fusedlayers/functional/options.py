"""Checks of options, whose errors name the option, what it is, and what was expected."""

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor


def checked_flag(name: str, value: Any) -> bool:
    """``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")
    return value


def checked_patterns(name: str, value: Any, expected: str = "a str or a tuple of str") -> tuple[str, ...]:
    """Patterns of paths: one, or a tuple of them."""
    found = (value,) if isinstance(value, str) else value
    if not (isinstance(found, tuple) and all(isinstance(each, str) for each in found)):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    return found


def checked_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """One of several words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def checked_number(name: str, value: Any, expected: str, right: Callable[[float], bool] = math.isfinite) -> float:
    """A finite number for which ``right`` holds, as ``expected`` says in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {expected}, got {_shown(value)}")
    if not (math.isfinite(value) and right(value)):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)


def checked_size(name: str, value: Any) -> int:
    """A positive int, or what counts as one, as NumPy's ints do."""
    try:
        size = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be a positive int, got {_shown(value)}")
    if size <= 0:
        raise ValueError(f"{name} must be a positive int, got {size}")
    return size


def _shown(value: Any) -> str:
    """A value of the wrong type; of tensors, which may be large and on a GPU, only the type."""
    kind = type(value).__name__
    return kind if isinstance(value, Tensor) else f"{value!r} ({kind})"
