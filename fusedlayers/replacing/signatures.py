"""A signature that differs between modules that may compute different things: equal ones are read only once."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from .reading.sources import codes_in
from .reading.values import PLAIN
from .remembering import Remembered

# Attributes of every nn.Module.
_OF_MODULES = frozenset(vars(nn.Module()))
_names: Remembered[frozenset[str]] = Remembered()


def signature(block: nn.Module, taken: set[nn.Module]) -> Hashable:
    """The classes in a block, the sizes of its tensors, and the attributes that its methods read."""
    return tuple(_of(path, module, module in taken) for path, module in block.named_modules())


def _of(path: str, module: nn.Module, taken: bool) -> Hashable:
    if isinstance(module, torch.jit.ScriptModule):
        # Its class does not determine what it computes.
        return path, id(module), taken
    kind = type(module)
    forward: Hashable = kind.forward
    read = _names.get((kind, forward), lambda: _names_read(kind, forward))
    options = [
        (name, value if isinstance(value, (*PLAIN, tuple)) and _is_hashable(value) else id(value))
        for name, value in vars(module).items()
        if name in read and name not in _OF_MODULES
    ]
    tensors = [(name, _shape(each)) for name, each in (*module._parameters.items(), *module._buffers.items())]
    return path, kind, forward, taken, tuple(options), tuple(tensors)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _names_read(kind: type[nn.Module], forward: object) -> frozenset[str]:
    """The names in the methods of a class, except in __init__; ``forward`` may be patched."""
    functions: list[Any] = [forward]
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        functions += [function for name, function in vars(base).items() if name != "__init__"]
    found = [inner.__code__ for each in functions if hasattr(inner := inspect.unwrap(each), "__code__")]
    codes = [each for code in found for each in codes_in(code)]
    # hasattr and getattr take names as strings.
    strings = {value for each in codes for value in each.co_consts if isinstance(value, str)}
    return frozenset(strings.union(*(each.co_names for each in codes)))
