"""A cache of what is known about classes and functions, for as long as these exist."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_Found = TypeVar("_Found")


class Remembered(Generic[_Found]):
    """Results by key. Keys hold the user's classes, functions and modules weakly; an entry goes when one of them does.

    Results must not refer to what their keys hold.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, _Found] = {}

    def get(self, key: Hashable, find: Callable[[], _Found]) -> _Found:
        """The cached result; on a miss, what ``find`` returns."""
        asked = _weakly(key)
        if asked not in self._results:
            found = find()
            kept: Hashable = _weakly(key, lambda _: self._results.pop(kept, None))
            self._results[kept] = found
        return self._results[asked]


def _weakly(part: Any, forget: Callable[[Any], Any] | None = None) -> Hashable:
    if isinstance(part, tuple):
        return tuple(_weakly(each, forget) for each in part)
    if isinstance(part, types.MethodType):
        return weakref.WeakMethod(part, forget)
    try:
        return weakref.ref(part, forget)
    except TypeError:
        # Strings, numbers and dtypes: not objects of the user's.
        return part
