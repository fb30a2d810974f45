"""``experts_implementation="fusedlayers"``: registers this library with transformers' experts implementations.

transformers is never imported here. If it is already imported, the name is registered at once, else as soon as the
module with its interface is imported.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from ...functional import moe_ffn
from ...modules import outside_of_traces, say_once
from . import Constants, constants_of, run_traced, why_not_these
from .formula import IMPLEMENTATION, INTERFACE, ExpertsFFN, find_experts, why_not_as_found

# Runs experts that compute no FFN: the default of transformers.
_INSTEAD = "grouped_mm"
# Since torch 2.13 Dynamo accepts a module as an argument of a function that it does not trace.
_TAKES_MODULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# The result of reading each module.
_read: weakref.WeakKeyDictionary[nn.Module, ExpertsFFN | str] = weakref.WeakKeyDictionary()


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a module in one call of ``functional.moe_ffn``, or as ``grouped_mm`` if they compute no FFN."""
    x, index, weights = hidden_states, top_k_index, top_k_weights
    y = None
    if is_dynamo_compiling():
        y = run_traced(module, _constants(module), x, index, weights) if _TAKES_MODULES else None
    else:
        found = _find(module)
        if isinstance(found, str):
            reason: str | None = found
        else:
            reason = why_not_as_found(module, found) or why_not_these(module, found, x, index, weights)
            if reason is None:
                y = moe_ffn(x, index, weights, **found.tensors(module), **dict(found.formula)).to(x.dtype)
        if reason is not None:
            say_once(module, reason, f"runs as with experts_implementation={_INSTEAD!r}")
    if y is not None:
        return y
    interface: Any = sys.modules[INTERFACE]
    return interface.ALL_EXPERTS_FUNCTIONS[_INSTEAD](module, x, index, weights)


@outside_of_traces
def _constants(module: nn.Module) -> Constants | None:
    found = _find(module)
    return None if isinstance(found, str) or why_not_as_found(module, found) else constants_of(module, found)


def _find(module: nn.Module) -> ExpertsFFN | str:
    found = _read.get(module)
    if found is None:
        found = _read[module] = find_experts(_without_parametrizations(module))
    return found


def _without_parametrizations(module: nn.Module) -> nn.Module:
    """The module without peft's parametrizations, which peft puts in place only during a call."""
    if not parametrize.is_parametrized(module):
        return module
    parametrized: Any = module.parametrizations
    plain: nn.Module = object.__new__(type(module).__bases__[0])
    vars(plain).update(vars(module))
    vars(plain)["_parameters"] = module._parameters | {name: each.original for name, each in parametrized.items()}
    vars(plain)["_modules"] = {name: each for name, each in module._modules.items() if each is not parametrized}
    return plain


def _register_in(interface: ModuleType) -> None:
    functions = getattr(interface, "ALL_EXPERTS_FUNCTIONS", None)
    if functions is not None:
        functions.register(IMPLEMENTATION, experts_forward)


class _WhenImported(MetaPathFinder):
    """Finds the module with the interface as the import system would, and registers the name once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == INTERFACE else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(_execute, loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], interface: ModuleType) -> None:
    execute(interface)
    _register_in(interface)


def register_experts() -> None:
    """Register ``experts_implementation="fusedlayers"`` with transformers, now or when it is imported."""
    interface = sys.modules.get(INTERFACE)
    if interface is not None:
        _register_in(interface)
    else:
        sys.meta_path.insert(0, _WhenImported())
