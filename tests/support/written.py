"""Blocks whose forward is a text: for tables of methods, each beside what `replace` is to say of it."""

from __future__ import annotations

import itertools
import linecache
import sys
import textwrap
from types import ModuleType
from typing import Any

_numbers = itertools.count()


def remembered(source: str) -> str:
    """The name of a file that is nowhere, of which Python shows these lines."""
    name = f"/nowhere/written_{next(_numbers)}.py"
    # Without a time nobody looks for the file on the disk.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


def written(base: type[Any], body: str, arguments: str = "self, x", name: str = "Written") -> type[Any]:
    """A class derived from ``base`` with this forward, which may use every name of the module of ``base``.

    Under a name of its own it lies in that module, where pickle finds it.
    """
    module: ModuleType = sys.modules[base.__module__]
    source = f"def forward({arguments}):\n{textwrap.indent(body, '    ')}\n"
    found: dict[str, Any] = {}
    exec(compile(source, remembered(source), "exec", dont_inherit=True), vars(module), found)
    made = type(name, (base,), found | {"__module__": base.__module__})
    if name != "Written":
        setattr(module, name, made)
    return made
