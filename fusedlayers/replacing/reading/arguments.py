"""Checks the constant arguments of functions that are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .values import Formula, Known, NotUnderstood


def plain(value: Any, what: str) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(plain(each, what) for each in value)
    if not isinstance(value, Known):
        raise NotUnderstood(f"gives {what} what is no constant")
    return tuple(value.value) if isinstance(value.value, (list, tuple)) else value.value


def arguments(args: Sequence[Any], options: dict[str, Any], what: str, **defaults: Any) -> dict[str, Any]:
    """The constant arguments of a function by name, in the order of ``defaults``."""
    if len(args) > len(defaults) or set(options) - set(defaults):
        raise NotUnderstood(f"gives options to {what}")
    given = dict(zip(defaults, args, strict=False)) | options
    return {name: plain(given[name], what) if name in given else value for name, value in defaults.items()}


def last_dimension(x: Formula, dim: Any, what: str) -> None:
    if dim not in (-1, (-1,)):
        raise NotUnderstood(f"calls {what} along another dimension than the last one")
