"""The class that `replace` gives to mixture-of-experts modules: they run ``functional.moe_ffn``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..functional import moe_ffn
from ..modules import outside_of_traces, say_once, why_not_now
from .activations import watched_options
from .expert_ffns import ExpertsFFN, eager_forward, why_not_as_found
from .reading.values import PLAIN
from .swapping import OWN_FORWARD, ReplacedModule, fused_class

# Constants of a traced call: names, formula, activation, its options, other options.
Facts = tuple[Any, ...]
_PLAIN = (Tensor, nn.Parameter)


class FusedExperts(ReplacedModule):
    """Mixin of the classes made for experts: ``class Fused<Name>(FusedExperts, <Name>)``."""

    fused_ffn: ClassVar[ExpertsFFN]
    fused_recompute: ClassVar[Literal["auto"] | bool | int] = "auto"
    # The names of the forward's arguments.
    fused_arguments: ClassVar[tuple[str, ...]]
    fused_watched = ("_apply_gate",)
    # The function that explain() looks up.
    function: ClassVar[Callable[..., Tensor]] = staticmethod(moe_ffn)

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would run the original forward, or None if it would run ``moe_ffn``."""
        if reason := self.why_fused_class_changed() or why_not_as_found(self, self.fused_ffn):
            return reason
        return why_not_these(self, self.fused_ffn, *tensors) if len(tensors) == 3 else why_not_now(*tensors)

    def call_arguments(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> dict[str, Any]:
        """The arguments of ``functional.moe_ffn`` for these tokens, by name."""
        found = self.fused_ffn
        routed = {"x": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
        return routed | found.tensors(self) | dict(found.formula) | {"recompute": self.fused_recompute is True}

    def run_fused(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *[kwargs[name] for name in self.fused_arguments[len(args) :] if name in kwargs]]
        if len(given) == 3 and len(args) + len(kwargs) == 3:
            y = self.run_experts(*given)
            if y is not None:
                return y
        return method(self, *args, **kwargs)

    def run_experts(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
        """The result of the experts, or None if the original forward must run."""
        if is_dynamo_compiling():
            return run_traced(self, self.traceable_experts(), x, index, weights, self.fused_recompute is True)
        if reason := self.why_called(x, index, weights):
            say_once(self, reason, OWN_FORWARD)
            return None
        return moe_ffn(**self.call_arguments(x, index, weights)).to(x.dtype)

    @outside_of_traces
    def traceable_experts(self) -> Facts | None:
        """What a traced call treats as constants."""
        return facts_of(self, self.fused_ffn) if self.why_called() is None else None


def why_not_these(module: nn.Module, found: ExpertsFFN, x: Any, index: Any, weights: Any) -> str | None:
    """Why a call with these tensors must run the original forward, or None."""
    if reason := why_not_now(x, index, weights):
        return reason
    if not all(isinstance(each, Tensor) for each in (x, index, weights)):
        return "it was called without experts, or without their weights"
    if not x.dim() == index.dim() == weights.dim():
        return f"its tokens have {x.dim()} dimensions, and their experts {index.dim()}"
    weight = getattr(module, found.names[0][1])
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"its tokens are of {x.dtype}, and its weights of {weight.dtype}"
    return None


def facts_of(module: nn.Module, found: ExpertsFFN) -> Facts:
    activation = None if found.activation is None else getattr(module, found.activation)
    watched = [(name, getattr(activation, name)) for name in watched_options(activation)]
    options = tuple((name, value) for name, value in watched if type(value) in PLAIN)
    return found.names, found.formula, found.activation, options, found.conditions.options


def run_traced(
    module: Any, facts: Facts | None, x: Tensor, index: Tensor, weights: Tensor, recompute: bool
) -> Tensor | None:
    """The result of the experts, traced by Dynamo; None if the original forward must run.

    Reads the module's attributes again and compares them with the facts, so that Dynamo guards them.
    """
    if facts is None:
        return None
    names, formula, activation_name, activation_options, options = facts
    for tensor in (x, index, weights):
        if type(tensor) not in _PLAIN:
            return None
    for name, value in options:
        if getattr(module, name) != value:
            return None
    if activation_name is not None:
        activation = getattr(module, activation_name)
        if getattr(activation, "forward", activation) is None:
            return None
        for name, value in activation_options:
            if getattr(activation, name) != value:
                return None
    given = {}
    for argument, name in names:
        given[argument] = getattr(module, name)
        if type(given[argument]) not in _PLAIN:
            return None
    return moe_ffn(x, index, weights, **given, **dict(formula), recompute=recompute).to(x.dtype)


def experts_class(
    original: type[nn.Module], found: ExpertsFFN, recompute: Literal["auto"] | bool | int
) -> type[FusedExperts]:
    """The class for modules of class ``original`` whose experts compute this FFN."""
    # The argument names are the author's: experts and weights, or router_indices and routing_weights.
    _, *arguments = inspect.signature(eager_forward(original)).parameters
    return fused_class(
        FusedExperts, original, fused_ffn=found, fused_recompute=recompute, fused_arguments=tuple(arguments)
    )


def why_class_stays(module: nn.Module) -> str | None:
    """What else keeps a module of experts from getting another class, or None."""
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance"
    if len(inspect.signature(eager_forward(type(module))).parameters) != 4:
        return "has a forward that does not take tokens, experts and weights alone"
    return None
