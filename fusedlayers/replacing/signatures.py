"""A signature that differs between modules that may compute different things: equal ones are read only once."""

from __future__ import annotations

import inspect
import types
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
    """The names in the methods and properties of a class, except in __init__, and in the user's functions that these
    call; ``forward`` may be patched."""
    left: list[Any] = [forward]
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            left += [function for name, function in vars(base).items() if name != "__init__"]
    names: set[str] = set()
    seen = set()
    while left:
        each = left.pop()
        function: Any = inspect.unwrap(getattr(each, "fget", None) or each)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for code in codes_in(function.__code__):
            # hasattr and getattr take names as strings.
            names.update(code.co_names, (value for value in code.co_consts if isinstance(value, str)))
            called = [function.__globals__.get(name) for name in code.co_names]
            own = [each for each in called if isinstance(each, types.FunctionType)]
            left += [each for each in own if not str(each.__module__).startswith("torch.")]
    return frozenset(names)
