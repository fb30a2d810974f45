"""What a module was read for, and must stay: its attributes, and the methods and functions that it calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from torch import nn

from .reading.reader import Reader
from .reading.values import ABSENT, NotUnderstood


class Conditions(NamedTuple):
    """For what the source of a module says what was read in it.

    Args:
        options: attributes of the module, by their paths, and their values.
        methods: the methods that were read besides the first one, by their classes and names.
        functions: the functions that these call: their modules, their names there, and the functions.
    """

    options: tuple[tuple[str, Any], ...] = ()
    methods: tuple[tuple[type[nn.Module], str], ...] = ()
    functions: tuple[tuple[str, str, Any], ...] = ()

    @classmethod
    def of(cls, reader: Reader, asked: Iterable[str | None] = (), activation: str | None = None) -> Conditions:
        """Those of a whole reading, but for attributes that are asked anew at every call, and what an activation reads.

        Raises:
            NotUnderstood: an attribute may change without another one in its place.
        """
        return cls(
            without(reader.watched, asked, activation),
            tuple(reader.methods),
            tuple((module, name, value) for (module, name), value in reader.functions.items()),
        )

    def why_changed(self, module: nn.Module) -> str | None:
        """What of a module is no longer what it was, or None; of its classes :meth:`owned` tells."""
        for path, value in self.options:
            now = attribute(module, path, ABSENT)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"its {path} was {value!r} when it was replaced"
        for each in module.modules():
            for kind, name in self.methods:
                # What is read past has its own words for a forward that was set on it.
                if name in vars(each) and isinstance(each, kind) and (each is module or name != "forward"):
                    return f"its {name} was set on the instance"
        return None

    def owned(self) -> tuple[tuple[Any, str, Any], ...]:
        """Methods and functions as they are now, by the class or module that has them, and their names there."""
        of_classes = [(kind, name, getattr(kind, name, ABSENT)) for kind, name in self.methods]
        return (*of_classes, *((sys.modules[module], name, function) for module, name, function in self.functions))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle functions by where they were read: a lambda has no name of its own, and one that somebody has put
        another in the place of must not become that one."""
        names = [(module, name, function is _function(module, name)) for module, name, function in self.functions]
        return _loaded, (self.options, self.methods, names)


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, ABSENT)


def _loaded(options: Any, methods: Any, names: list[tuple[str, str, bool]]) -> Conditions:
    functions = [(module, name, _function(module, name) if same else ABSENT) for module, name, same in names]
    return Conditions(options, methods, tuple(functions))


# Those of what is believed.
NONE = Conditions()


def without(
    watched: dict[str, Any], asked: Iterable[str | None], activation: str | None
) -> tuple[tuple[str, Any], ...]:
    """The attributes that were read, but for those that are asked anew at every call."""
    left, inner = {*asked, activation}, f"{activation}."
    found = [
        (path, value) for path, value in watched.items()
        if path not in left and (not path.startswith(inner) or path.endswith(".__class__"))
    ]  # fmt: skip
    if not all(isinstance(value, Hashable) for _, value in found):
        raise NotUnderstood("reads an attribute that may change")
    return tuple(found)


def attribute(block: nn.Module, name: str | None, default: Any = None) -> Any:
    """The part of ``block`` with this name, which may have dots; ``default`` where there is none."""
    if name is None:
        return default
    if "." not in name:
        return getattr(block, name, default)
    part: Any = block
    for step in name.split("."):
        part = getattr(part, step, default)
    return part
