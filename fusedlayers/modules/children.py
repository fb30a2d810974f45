"""What every fused module asks of its children: may they be read through, or must they be called?

A child is read through (its weights go to ``functional.ffn``) when nobody could tell the difference: it is exactly
``nn.Linear`` (or transformers' ``Conv1D``), with plain parameters, and nothing is attached to its call. Hooks,
quantisation, parametrization and sharding all live in that call, so any other child is called. Low-rank adapters live
there, too; ``adapters.py`` reads these.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..functional.call import plain_types
from ..kernels.torch_internals import has_global_hook, jit_trace

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}

# GPT-2's linear layer in transformers, known by name so that nothing is imported for it; its weight is [in, out].
_TRANSPOSED = "transformers.pytorch_utils.Conv1D"
# Linear layers of other names that compute what nn.Linear does; known by name, too.
_ALIKE = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
# peft's wrapper of a linear layer with adapters.
_ADAPTED = "peft.tuners.lora.layer.Linear"

# Classes whose calls are read past -> their original forward, taken at import for torch's own classes.
_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward
    for kind in (nn.Linear, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU)
}
# Other classes at first sight. The values are weak, too: a forward that calls super() refers to its class.
_SEEN: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[Callable[..., Any]]] = weakref.WeakKeyDictionary()

_log = logging.getLogger(__name__)
_said: set[str] = set()


def class_path(kind: type) -> str:
    """Where a class is imported from: ``package.module.Class``."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_name(module: object) -> str:
    """The class of ``module`` as a reader would write it: short for torch's own, with its package for others."""
    kind = type(module)
    return kind.__qualname__ if kind.__module__.startswith("torch.nn.") else class_path(kind)


def parameter(linear: nn.Module, name: str) -> Tensor | None:
    """The "weight" or "bias" of ``linear``, read from ``_parameters``, which is faster than an attribute."""
    kept = linear._parameters
    return kept[name] if name in kept else cast("Tensor | None", getattr(linear, name))


def is_adapted(linear: nn.Module) -> bool:
    """Whether ``linear`` wraps a linear layer and its adapters of low rank, as peft does."""
    return type(linear) is not nn.Linear and class_path(type(linear)) == _ADAPTED


def base_linear(linear: nn.Module) -> nn.Module:
    """The linear layer itself, where adapters wrap it."""
    return cast(nn.Module, linear.base_layer) if is_adapted(linear) else linear


def active_adapter(linear: Any) -> str | None:
    """The name of the adapter that takes part in a call of ``linear``, or None."""
    if not is_adapted(linear) or linear.disable_adapters or linear.merged:
        return None
    return next((name for name in linear.active_adapters if name in linear.lora_A), None)


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight of a plain linear is laid out ``[in, out]``."""
    return type(linear) is not nn.Linear and class_path(type(linear)) == _TRANSPOSED


def linear_weight(linear: nn.Module) -> Tensor:
    """The weight of a plain linear in ``nn.Linear``'s layout ``[out, in]``: itself, or a view of it.

    With adapters it is that of the wrapped linear.
    """
    linear = base_linear(linear)
    weight = cast(Tensor, parameter(linear, "weight"))
    return weight.t() if is_transposed(linear) else weight


def split_gate(merged: Tensor, gate_rows: str) -> tuple[Tensor, Tensor]:
    """The gate and the up projection of a weight ``[2N, K]`` or bias ``[2N]`` that holds both: two views.

    ``gate_rows``: "first", "last", "even" or "odd", the rows of the gate. Autograd assembles the gradient of the whole
    in one pass.
    """
    if gate_rows in ("first", "last"):
        halves = merged.unflatten(0, (2, -1)).unbind(0)
    else:
        halves = merged.unflatten(0, (-1, 2)).unbind(1)
    gate, up = halves if gate_rows in ("first", "even") else halves[::-1]
    return gate, up


def why_must_be_called(module: nn.Module) -> str | None:
    """What is attached to the call of ``module`` and would be lost without it, or None."""
    for attribute, hook in _HOOKS.items():
        if getattr(module, attribute):
            return f"has {hook}"
    # Offloading libraries put a forward on the instance.
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    return None


def why_not_read_past(module: nn.Module) -> str | None:
    """Why a module of a known class must be called all the same: what is attached to it, or to its class; or None."""
    return why_must_be_called(module) or why_called_otherwise(type(module)) or why_patched(type(module))


def why_called_otherwise(kind: type[nn.Module]) -> str | None:
    """What a call of a module of this class does besides its forward and its hooks, or None."""
    plain = kind.__call__ is nn.Module.__call__ and kind._call_impl is nn.Module._call_impl
    return None if plain else "has a call of its own"


def patched_method(kind: type[nn.Module], method: str) -> str | None:
    """What replaced a method of the class, or of the base that defines it; None: nothing."""
    owner = next((base for base in kind.__mro__ if method in vars(base)), None)
    function = None if owner is None else vars(owner)[method]
    names = [getattr(function, name, None) for name in ("__module__", "__qualname__")]
    if owner is None or names == [owner.__module__, f"{owner.__qualname__}.{method}"]:
        return None
    return ".".join(map(str, names))


def why_patched(kind: type[nn.Module]) -> str | None:
    """Why the forward of the class is not the one that its author wrote, or None."""
    own = _FORWARDS.get(kind)
    if own is None:
        if (seen := _SEEN.get(kind)) is not None:
            own = seen()
        elif torch.compiler.is_compiling():
            return None
        elif patch := patched_method(kind, "forward"):
            return f"has another forward than its class was written with: {patch}"
        else:
            own = kind.forward
            _SEEN[kind] = weakref.ref(own)
    return None if kind.forward is own else "has another forward than its class was written with"


def why_not_plain_tensor(tensor: Tensor) -> str | None:
    """Why ``tensor`` is more than an ordinary dense tensor (a DTensor, a quantised or nested one), or None."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter and type(tensor) not in plain_types():
        return f"is a {class_name(tensor)}, not a plain tensor"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    return None


def why_not_plain(linear: nn.Module) -> str | None:
    """Why the weights of ``linear`` may not be read past its call, or None if it is a plain linear."""
    transposed = is_transposed(linear)
    if type(linear) is not nn.Linear and not transposed and class_path(type(linear)) not in _ALIKE:
        # torch's parametrization changes the class, too.
        parametrized = parametrize.is_parametrized(linear)
        return "is parametrized" if parametrized else f"is a {class_name(linear)}, not exactly nn.Linear"
    if reason := why_not_read_past(linear):
        return reason
    weight, bias = cast(Tensor, parameter(linear, "weight")), parameter(linear, "bias")
    if reason := why_not_plain_tensor(weight):
        return f"has a weight that {reason}"
    if not weight.is_floating_point():
        return f"has a weight of {weight.dtype}"
    # Between calls FSDP1 and DeepSpeed leave a vector, or an empty tensor.
    if weight.dim() != 2:
        return f"has a weight of shape {list(weight.shape)}"
    if bias is None:
        return None
    if reason := why_not_plain_tensor(bias):
        return f"has a bias that {reason}"
    # torch.jit would trace the comparison, and warn; it calls the children anyway.
    outputs = 1 if transposed else 0
    if not torch.jit.is_tracing() and (bias.dim() != 1 or bias.shape[0] != weight.shape[outputs]):  # type: ignore[attr-defined]
        return f"has a bias of shape {list(bias.shape)} for {weight.shape[outputs]} columns"
    if bias.dtype != weight.dtype or bias.device != weight.device:
        return f"has a bias of {bias.dtype} on {bias.device}, but a weight of {weight.dtype} on {weight.device}"
    return None


def why_not_now(*tensors: Tensor | None) -> str | None:
    """Why a call with these tensors must go through the children although they are plain, or None."""
    if has_global_hook():
        return "a hook is registered for all modules"
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit is tracing"
    for tensor in tensors:
        if tensor is None:
            continue
        # Other types go on to the error that names the argument.
        is_tensor = isinstance(tensor, Tensor) or hasattr(type(tensor), "__torch_function__")
        if is_tensor and (reason := why_not_plain_tensor(tensor)):
            return f"an input {reason}"
    return None


def is_plain_now(tensor: object) -> bool:
    """A cheap test: True implies that :func:`why_not_now` gives None for this input; False: ask it."""
    return (
        (type(tensor) is Tensor or type(tensor) is nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not has_global_hook()
        and jit_trace() is None
    )


def say_once(module: nn.Module, reason: str, instead: str = "calls its children") -> None:
    """One INFO line per class and reason: what this module does ``instead`` of running fused."""
    if torch.compiler.is_compiling():
        return
    line = f"{class_name(module)} {instead}: {reason}"
    if line not in _said:
        _said.add(line)
        _log.info(line)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module and, where it has none of that name, of its classes below nn.Module; no methods.

    Children and parameters are not included; an attribute of the same name hides them.
    """
    found: dict[str, Any] = {}
    kinds = type(module).__mro__
    for base in reversed(kinds[: kinds.index(nn.Module)]):
        found |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    static = {name: getattr(value, "__func__", value) for name, value in found.items() if not _is_method(value)}
    return {name: value for name, value in static.items() if not isinstance(value, type)} | vars(module)


def _is_method(value: Any) -> bool:
    """Whether it is a descriptor, so that an instance reads something other than the class attribute."""
    return hasattr(type(value), "__get__") and not isinstance(value, staticmethod)
