"""The conditions under which a reading of a module's source stays valid: its attributes, methods and functions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from torch import nn

from .reading.reader import Reader
from .reading.values import ABSENT, NotUnderstood


class Conditions(NamedTuple):
    """The conditions under which a module computes what was read from its source.

    Args:
        options: attributes of the module, by path, and their values.
        methods: the methods that were read besides the first one: (class, name).
        functions: the functions that these call: (module, name in it, function).
    """

    options: tuple[tuple[str, Any], ...] = ()
    methods: tuple[tuple[type[nn.Module], str], ...] = ()
    functions: tuple[tuple[str, str, Any], ...] = ()

    @classmethod
    def of(cls, reader: Reader, asked: Iterable[str | None] = (), activation: str | None = None) -> Conditions:
        """The conditions of a whole reading, without attributes that are looked up at every call and what an activation
        reads.

        Raises:
            NotUnderstood: an attribute is mutable, so that it could change in place.
        """
        return cls(
            without(reader.watched, asked, activation),
            tuple(reader.methods),
            tuple((module, name, value) for (module, name), value in reader.functions.items()),
        )

    def why_changed(self, module: nn.Module) -> str | None:
        """What has changed in a module, or None; changed methods of its classes are checked through :meth:`owned`."""
        for path, value in self.options:
            now = attribute(module, path, ABSENT)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"its {path} was {value!r} when it was replaced"
        for each in module.modules():
            for kind, name in self.methods:
                # A forward set on a child that is not called is reported elsewhere.
                if name in vars(each) and isinstance(each, kind) and (each is module or name != "forward"):
                    return f"its {name} was set on the instance"
        return None

    def owned(self) -> tuple[tuple[Any, str, Any], ...]:
        """The current methods and functions: (class or module that holds it, name, function)."""
        of_classes = [(kind, name, getattr(kind, name, ABSENT)) for kind, name in self.methods]
        return (*of_classes, *((sys.modules[module], name, function) for module, name, function in self.functions))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle functions by module and name, since lambdas cannot be pickled. One that has been replaced since must
        not be unpickled as its replacement."""
        names = [(module, name, function is _function(module, name)) for module, name, function in self.functions]
        return _loaded, (self.options, self.methods, names)


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, ABSENT)


def _loaded(options: Any, methods: Any, names: list[tuple[str, str, bool]]) -> Conditions:
    functions = [(module, name, _function(module, name) if same else ABSENT) for module, name, same in names]
    return Conditions(options, methods, tuple(functions))


# No conditions: for rules that are trusted.
NONE = Conditions()


def without(
    watched: dict[str, Any], asked: Iterable[str | None], activation: str | None
) -> tuple[tuple[str, Any], ...]:
    """The attributes that were read, without those that are looked up at every call."""
    left, inner = {*asked, activation}, f"{activation}."
    found = [
        (path, value) for path, value in watched.items()
        if path not in left and (not path.startswith(inner) or path.endswith(".__class__"))
    ]  # fmt: skip
    if not all(isinstance(value, Hashable) for _, value in found):
        raise NotUnderstood("reads an attribute that may change")
    return tuple(found)


def attribute(block: nn.Module, name: str | None, default: Any = None) -> Any:
    """The attribute of ``block`` at this path (with or without dots); ``default`` if there is none."""
    if name is None:
        return default
    part: Any = block
    for step in name.split("."):
        part = getattr(part, step, default)
    return part
