"""Which of our activations a module or function computes: known by its class, or found by comparing values."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..kernels.activations import ACTIVATIONS, ALIASES, LEAKY_SLOPE, canonical_activation
from ..modules import attributes_of
from .formulas import PLAIN, TORCH_FUNCTIONS, is_formula
from .remembering import Remembered
from .trials import quietly

_CLASSES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}
_FUNCTIONS: dict[Callable[..., Tensor], str] = {
    F.gelu: "gelu",
    **{function: name for name, functions in TORCH_FUNCTIONS.items() for function in functions},
}
# Values where activations differ: around zero, where they saturate, and where some are cut off.
_VALUES = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([-1e4, -300.0, -30.0, 30.0, 300.0, 1e4])]).double()
# Some write a constant with ten digits.
_TOLERANCE = 1e-9


def torch_module_activation(activation: object) -> str | None:
    """Our name of an activation: a module, a function or a name; None: it is none of ours.

    torch's own are known. Any other is called on some numbers: it is the one of ours that has the same values and
    slopes, in training and in evaluation.
    """
    if isinstance(activation, str):
        return canonical_activation(activation) if activation in ACTIVATIONS or activation in ALIASES else None
    if isinstance(activation, functools.partial):
        options = set(activation.keywords)
        if activation.func is F.gelu and not activation.args and options <= {"approximate"}:
            return _gelu(activation.keywords.get("approximate", "none"))
        return None
    if type(activation) is nn.GELU:
        return _gelu(activation.approximate)
    if type(activation) is nn.LeakyReLU:
        return "leaky_relu" if activation.negative_slope == LEAKY_SLOPE else None
    if isinstance(activation, nn.Module):
        return _CLASSES.get(type(activation)) or _of_unknown_module(activation)
    if callable(activation) and isinstance(activation, Hashable):
        return _FUNCTIONS.get(activation) or _compared(activation, activation)
    return None


def _gelu(approximate: str) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


def _of_unknown_module(module: nn.Module) -> str | None:
    # What has parameters, or modules of its own, computes more than a function of one number; and a dropout of p = 0
    # is no activation.
    if module._parameters or module._buffers or module._modules or isinstance(module, _DropoutNd):
        return None
    options = _options(module)
    fixed = (
        type(value) in PLAIN or inspect.isroutine(value) or type(value) is functools.partial
        for value in options.values()
    )
    if not all(fixed):
        return None
    return _compared((type(module), type(module).forward, *sorted(options.items(), key=str)), module)


def _options(module: nn.Module) -> dict[str, Any]:
    """What a module reads besides what every module has: attributes of its own, and of its class."""
    return {name: value for name, value in attributes_of(module).items() if name not in _OF_MODULES}


# What every module has, and what a replaced one keeps.
_OF_MODULES = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
_found: Remembered[str | None] = Remembered()


def _compared(key: Hashable, activation: Any) -> str | None:
    """The activation of ours that this one equals; what was found once under ``key`` is not asked again."""
    return _found.get(key, lambda: _equal_one(activation))


def _equal_one(activation: Any) -> str | None:
    # All of it, as the call that asks may be made without gradients.
    with quietly():
        results = []
        for training in (True, False):
            run = activation
            if isinstance(activation, nn.Module):
                run = copy.copy(activation)
                run.training = training
            try:
                if not _is_of_torch(activation) and not is_formula(run):
                    return None
                results.append(_value_and_slope(run))
            except Exception:
                # What does not run on a vector of numbers is no activation, whatever else it is.
                return None
        for name, known in ACTIVATIONS.items():
            value, slope = _value_and_slope(known.torch)
            if all(_alike(mine, value) and _alike(theirs, slope) for mine, theirs in results):
                return name
    return None


def _value_and_slope(activation: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    z = _VALUES.clone().requires_grad_()
    # A tensor that an activation may change in place.
    value = activation(z * 1)
    [slope] = torch.autograd.grad(value.sum(), z)
    return value, slope


def watched_options(activation: object) -> list[str]:
    """The names of options by which a module of the user's may become another activation."""
    if not isinstance(activation, nn.Module) or _is_of_torch(activation):
        return []
    return [name for name, value in _options(activation).items() if type(value) is not functools.partial]


def _is_of_torch(activation: object) -> bool:
    kind = type(activation) if isinstance(activation, nn.Module) else activation
    return inspect.isbuiltin(activation) or str(getattr(kind, "__module__", None)).startswith("torch.")


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
