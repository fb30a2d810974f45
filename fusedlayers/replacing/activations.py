"""Which activation of this library a module or function computes: known by its class, or read from its source."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import nn

from ..kernels.activations import ACTIVATIONS, ALIASES, canonical_activation
from ..modules import attributes_of, why_called_otherwise
from .conditions import Conditions
from .reading import operations
from .reading.activation_modules import known_activation
from .reading.formulas import ffn_before
from .reading.polynomials import TooLarge, activation_giving, linear_result
from .reading.reader import Reader
from .reading.values import PLAIN, Formula, Known, NotUnderstood
from .remembering import Remembered


def torch_module_activation(activation: object) -> str | None:
    """This library's name of an activation (a module, a function or a name), or None if it has none.

    torch's own activations are looked up. The source of any other is read, and its formula compared with each of ours.
    """
    if isinstance(activation, str):
        return canonical_activation(activation) if activation in ACTIVATIONS or activation in ALIASES else None
    known = known_activation(activation)
    if known is not None or isinstance(activation, functools.partial):
        return known
    found = _reading_of(activation)
    return found.name if found is not None and found.stands() else None


def glu_of(module: nn.Module, columns: int) -> tuple[str, str] | None:
    """The activation of one half of a module's input, by which it multiplies the other half, and which half that is.

    The input has so many ``columns``; the half is "first", "last", "even" or "odd". None: the module is no such GLU.
    """
    found = _of_module(module, columns)
    if found is None or found.name is None or found.gate_rows is None or not found.stands():
        return None
    return found.name, found.gate_rows


def functions_read(activation: object, columns: int) -> list[tuple[Any, str]]:
    """The user's methods and functions that an activation calls, or a GLU of so many columns, as pairs (class or module
    that holds it, name)."""
    found = None if isinstance(activation, str) or known_activation(activation) else _reading_of(activation)
    if found is not None and found.name is None and isinstance(activation, nn.Module):
        found = _of_module(activation, columns)
    return [] if found is None else [(owner(), name) for owner, name, _ in found.functions]


class _Reading(NamedTuple):
    """The name of an activation, and the functions that were read for it: as weak references, since results are
    cached. Of a GLU also which half of its input the activation is applied to."""

    name: str | None
    functions: tuple[tuple[weakref.ref[Any], str, weakref.ref[Any]], ...] = ()
    gate_rows: str | None = None

    def stands(self) -> bool:
        """Whether all functions that were read are still in place."""
        return all(getattr(owner(), name, None) is function() for owner, name, function in self.functions)


def _reading_of(activation: object) -> _Reading | None:
    if isinstance(activation, nn.Module):
        return _of_module(activation)
    if callable(activation) and isinstance(activation, Hashable) and not isinstance(activation, functools.partial):
        return _found.get(activation, lambda: _named(activation))
    return None


def _of_module(module: nn.Module, columns: int | None = None) -> _Reading | None:
    """What was read of an elementwise module, or of a GLU of an input with so many columns."""
    # A module with parameters, buffers or children is more than an elementwise function.
    if module._parameters or module._buffers or module._modules or "forward" in vars(module):
        return None
    if why_called_otherwise(type(module)) is not None:
        return None
    options = _options(module)
    fixed = (
        type(value) in PLAIN or inspect.isroutine(value) or type(value) is functools.partial
        for value in options.values()
    )
    if not all(fixed):
        return None
    key = (type(module), type(module).forward, columns, *sorted(options.items(), key=str))
    return _found.get(key, lambda: _named(module, columns))


def _options(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module may read besides those of every nn.Module: its own, and its class's."""
    return {name: value for name, value in attributes_of(module).items() if name not in _OF_MODULES}


# Attributes of every nn.Module; a replaced one keeps them.
_OF_MODULES = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
# Cache: what was read, by activation.
_found: Remembered[_Reading] = Remembered()


def _named(activation: Any, columns: int | None = None) -> _Reading:
    """The activation of ours that equals this one, evaluated on a symbol, or that of a GLU of so many columns."""
    reader = Reader(activation if isinstance(activation, nn.Module) else nn.Module())
    x = reader.input(columns)
    if columns is not None:
        x = x.with_value(linear_result("up", x.value))
    try:
        result = _read(activation, reader, x)
        if not isinstance(result, Formula) or result.wide or not result.shaped:
            return _Reading(None)
        functions = Conditions.of(reader).owned()
        read = tuple((weakref.ref(owner), name, weakref.ref(each)) for owner, name, each in functions)
        if columns is None:
            return _Reading(activation_giving(result.value, x.value), read)
        ffn = ffn_before("down", result.value, reader.lines)
    except (NotUnderstood, TooLarge, TypeError):
        # TypeError: properties cannot be weakly referenced.
        return _Reading(None)
    return _Reading(None if ffn.dropout else ffn.activation, read, ffn.gate_rows)


def _read(activation: Any, reader: Reader, x: Formula) -> Any:
    if isinstance(activation, nn.Module):
        return reader.read(type(activation).forward, x)
    if operations.is_known(activation):
        return reader.call(Known(activation), (x,), {})
    # A bound method may read any attribute of its owner.
    if not isinstance(activation, types.FunctionType):
        raise NotUnderstood("is no function of Python")
    return reader.inlined(activation, (x,), {})


def watched_options(activation: object) -> list[str]:
    """The attributes of a user's activation module that decide which function it computes."""
    if not isinstance(activation, nn.Module) or type(activation).__module__.startswith("torch."):
        return []
    return [name for name, value in _options(activation).items() if type(value) is not functools.partial]
