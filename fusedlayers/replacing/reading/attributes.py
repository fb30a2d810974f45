"""Resolves names and attributes, and records what they depend on."""

from __future__ import annotations

import builtins
import math
import sys
import types
import typing
from typing import Any

import torch
from torch import Tensor, nn

from ...modules import class_name
from . import operations
from .polynomials import atom
from .state import Frame, State
from .values import ABSENT, PLAIN, Dtype, Formula, Known, Listed, Method, NotUnderstood, Part, Shape, Training, Weight

_MISSING = object()
# The longest loop that is unrolled.
MOST_ROUNDS = 200


class Attributes(State):
    """The part of the reader that resolves names."""

    def _around(self, name: str, frame: Frame) -> Any:
        """A name that is not a local variable."""
        code, closure = frame.function.__code__, frame.function.__closure__ or ()
        if name in code.co_freevars or name in code.co_varnames:
            raise NotUnderstood(f"reads the variable {name} of a function around it" if closure else f"reads {name}")
        space = frame.function.__globals__
        if name not in space:
            if hasattr(builtins, name):
                return Known(getattr(builtins, name))
            raise NotUnderstood(f"reads the unknown name {name}")
        value = space[name]
        if isinstance(value, types.ModuleType):
            return Known(value)
        if callable(value) and not isinstance(value, type) and value is not typing.cast:
            # The function may be patched: its name is watched.
            if vars(sys.modules.get(str(space.get("__name__")), builtins)) is not space:
                raise NotUnderstood(f"calls the function {name} of a module that nobody finds")
            self._note("functions", (str(space.get("__name__")), name), value)
            return Known(value)
        if isinstance(value, type) or value is typing.cast or operations.is_dtype(value):
            return Known(value)
        raise NotUnderstood(f"reads the global variable {name}")

    def attribute(self, owner: Any, name: str) -> Any:
        """The attribute of a value."""
        if isinstance(owner, Part):
            return self._of_part(owner, name)
        if isinstance(owner, Formula):
            if name in ("shape", "dtype"):
                return Shape(owner) if name == "shape" else Dtype(owner.wide)
            return Method(owner, name)
        if isinstance(owner, Weight) and name == "dtype":
            return Dtype(False)
        if isinstance(owner, Known) and isinstance(owner.value, types.ModuleType):
            value = getattr(owner.value, name, _MISSING)
            # Attributes of modules other than torch's may be reassigned by anybody.
            of_torch = owner.value.__name__.partition(".")[0] == "torch"
            if not of_torch and owner.value not in (math, typing):
                raise NotUnderstood(f"reads {owner.value.__name__}.{name}")
            if isinstance(value, types.ModuleType) or operations.is_known(value) or operations.is_dtype(value):
                return Known(value)
            if owner.value is math or owner.value is typing or (owner.value is torch and name == "Tensor"):
                return Known(value)
            raise NotUnderstood(f"reads {owner.value.__name__}.{name}")
        if isinstance(owner, Known) and owner.path is not None:
            return self._of_object(owner, name)
        if isinstance(owner, (Listed, dict)):
            # One of its methods may change it.
            self._poison([owner])
        raise NotUnderstood(f"reads the {name} of something")

    def _of_object(self, owner: Known, name: str) -> Any:
        """A plain value in an object among the attributes, such as a configuration."""
        value = getattr(owner.value, "__dict__", {}).get(name, _MISSING)
        if type(value) not in PLAIN or self.is_written(f"{owner.path}.{name}"):
            # A method that is not read may write to the object.
            self._poison([owner])
            raise NotUnderstood(f"reads {owner.path}.{name}")
        return self._watch(f"{owner.path}.{name}", value)

    def _of_part(self, owner: Part, name: str) -> Any:
        module, path = owner.module, owner.inner(name)
        kind = type(module)
        if name == "__class__" and not owner.path:
            self._look_at_class()
        if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
            raise NotUnderstood(f"reads attributes of a {class_name(module)}, which finds them in its own way")
        if self.is_written(path):
            raise NotUnderstood(f"reads {path}, which it writes")
        if name == "training":
            return Training(owner.path)
        held = vars(module).get(name, _MISSING)
        if held is _MISSING:
            for base in kind.__mro__:
                if name in vars(base):
                    return self._of_class(owner, name, vars(base)[name])
            if name in module._parameters:
                return self._parameter(path, module._parameters[name])
            if name in module._modules:
                return self._child(owner, name)
            raise NotUnderstood(f"reads {path}, which is a buffer or missing")
        return self._plain_or_callable(owner, path, held)

    def _plain_or_callable(self, owner: Part, path: str, value: Any) -> Any:
        if type(value) in PLAIN or (isinstance(value, tuple) and all(type(each) in PLAIN for each in value)):
            return self._watch(path, value)
        if isinstance(value, types.MethodType) and value.__self__ is owner.module:
            # Watch the function: the bound method would refer to the module, and the module keeps what is watched.
            self._watch(f"{path}.__func__", value.__func__)
            return Method(owner, value.__name__, value.__func__)
        if isinstance(value, Tensor):
            raise NotUnderstood(f"reads the tensor {path}")
        return self._watch(path, value) if callable(value) else Known(value, path)

    def _of_class(self, owner: Part, name: str, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return Method(owner, name, value)
        if isinstance(value, staticmethod):
            return self._plain_or_callable(owner, owner.inner(name), value.__func__)
        if isinstance(value, property) and value.fget is not None:
            self._note("methods", (type(owner.module), name), value)
            return self.inlined(value.fget, (owner,), {})
        if hasattr(type(value), "__get__"):
            raise NotUnderstood(f"reads {owner.inner(name)}, which a descriptor computes")
        return self._plain_or_callable(owner, owner.inner(name), value)

    def _parameter(self, path: str, parameter: Tensor | None) -> Any:
        if parameter is None:
            return self._watch(path, None)
        if parameter.dim() != 1:
            return Weight(path)
        return Formula(atom("parameter", path), parameter.shape[0], borrowed=True)

    def _child(self, owner: Part, name: str) -> Any:
        child, path = owner.module._modules[name], owner.inner(name)
        return self._watch(path, None) if child is None else Part(path, child)

    def _watch_length(self, row: Part) -> None:
        """Watch the length of a module list: its last module exists, and none follows it."""
        names = list(row.module._modules)
        if names:
            self._watch(row.inner(f"{names[-1]}.dump_patches"), nn.Module.dump_patches)
        self._watch(row.inner(f"{len(names)}"), ABSENT)

    def _items(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, tuple):
            return value
        if isinstance(value, Part) and is_row(value.module):
            # The number of modules may change later.
            self._misses += 1
            return tuple(self._child(value, name) for name in value.module._modules)
        if isinstance(value, Known) and isinstance(value.value, (tuple, range)) and len(value.value) < MOST_ROUNDS:
            return tuple(map(Known, value.value))
        return None


def is_row(module: nn.Module) -> bool:
    """Whether a module is iterated as nn.ModuleList or nn.Sequential are; sharding derives classes from these."""
    own: Any = type(module)
    kinds: tuple[Any, ...] = (nn.ModuleList, nn.Sequential)
    return any(
        isinstance(module, kind) and own.__iter__ is kind.__iter__ and own.__getitem__ is kind.__getitem__
        for kind in kinds
    )
