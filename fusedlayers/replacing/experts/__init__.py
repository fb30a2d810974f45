"""Experts of a mixture: modules with the interface of transformers' experts run ``functional.moe_ffn``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...functional import moe_ffn
from ...functional.moe_ffn import MOE_FFN
from ...modules import outside_of_traces, say_once, why_not_now
from ...planning import Device
from ..activations import watched_options
from ..reading.values import PLAIN
from ..report import ALREADY_FUSED, Changes
from ..saving import TOKENS, Facts, of_tokens, planned
from ..signatures import signature
from ..swapping import OWN_FORWARD, ReplacedModule, fused_class
from ..wish import Wish
from .formula import (
    IMPLEMENTATION,
    ExpertsFFN,
    eager_forward,
    find_experts,
    implementation,
    is_experts,
    why_not_as_found,
)

# What a traced call treats as constants: names, formula, activation, its options, other options.
Constants = tuple[Any, ...]
_PLAIN = (Tensor, nn.Parameter)


class FusedExperts(ReplacedModule):
    """Mixin of the classes made for experts: ``class Fused<Name>(FusedExperts, <Name>)``."""

    fused_ffn: ClassVar[ExpertsFFN]
    fused_recompute: ClassVar[Literal["auto"] | bool | int] = "auto"
    fused_precision: ClassVar[str | None] = None
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
        options = {"recompute": self.fused_recompute is True, "precision": self.fused_precision}
        return routed | found.tensors(self) | dict(found.formula) | options

    def run_fused(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *[kwargs[name] for name in self.fused_arguments[len(args) :] if name in kwargs]]
        if not len(given) == len(args) + len(kwargs) == 3:
            return method(self, *args, **kwargs)
        x, index, weights = given
        y = None
        if is_dynamo_compiling():
            options = {"recompute": self.fused_recompute is True, "precision": self.fused_precision}
            y = run_traced(self, self.traceable_experts(), x, index, weights, **options)
        elif reason := self.why_called(x, index, weights):
            say_once(self, reason, OWN_FORWARD)
        else:
            y = moe_ffn(**self.call_arguments(x, index, weights)).to(x.dtype)
        return method(self, *args, **kwargs) if y is None else y

    @outside_of_traces
    def traceable_experts(self) -> Constants | None:
        """What a traced call treats as constants."""
        return constants_of(self, self.fused_ffn) if self.why_called() is None else None


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


def constants_of(module: nn.Module, found: ExpertsFFN) -> Constants:
    activation = None if found.activation is None else getattr(module, found.activation)
    watched = [(name, getattr(activation, name)) for name in watched_options(activation)]
    options = tuple((name, value) for name, value in watched if type(value) in PLAIN)
    return found.names, found.formula, found.activation, options, found.conditions.options


def run_traced(
    module: Any, constants: Constants | None, x: Tensor, index: Tensor, weights: Tensor, **choices: Any
) -> Tensor | None:
    """The result of the experts, traced by Dynamo; None if the original forward must run.

    Reads the module's attributes again and compares them with the constants, so that Dynamo guards them.
    """
    if constants is None:
        return None
    names, formula, activation_name, activation_options, options = constants
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
    return moe_ffn(x, index, weights, **given, **dict(formula), **choices).to(x.dtype)


def replace_experts(model: nn.Module, recompute: Literal["auto"] | bool | int, wish: Wish, changes: Changes) -> None:
    """Find mixture-of-experts modules, whose weights are stacked."""
    alike: dict[Hashable, ExpertsFFN | str] = {}
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        if isinstance(module, FusedExperts) or implementation(module) == IMPLEMENTATION:
            changes.skip(path, module, ALREADY_FUSED)
            continue
        # The argument names are the author's: experts and weights, or router_indices and routing_weights.
        _, *arguments = inspect.signature(eager_forward(type(module))).parameters
        ffn: ExpertsFFN | str
        if "forward" in vars(module):
            ffn = "has a forward of its own, set on the instance"
        elif len(arguments) != 3:
            ffn = "has a forward that does not take tokens, experts and weights alone"
        else:
            key = signature(module, set())
            ffn = alike[key] = alike.get(key) or find_experts(module)
        if isinstance(ffn, str):
            changes.skip(path, module, f"experts of a mixture: {ffn}", is_ffn_left=True)
            continue
        precision = wish.of(module)
        fused = fused_class(
            FusedExperts, type(module), fused_ffn=ffn, fused_recompute=recompute, fused_precision=precision,
            fused_arguments=tuple(arguments),
        )  # fmt: skip
        options: dict[str, Any] = {"recompute": recompute is True, "precision": precision}
        text = ffn.described(module) + wish.in_words(MOE_FFN, changes.on, **_batch(module, ffn), **options)
        changes.change(path, module, fused, text, *_facts(module, ffn, options, changes.on))


@torch.enable_grad()
def _batch(module: nn.Module, found: ExpertsFFN) -> dict[str, Any]:
    """The tensors and the formula of a call with a training batch, by name."""
    width, chosen, weight = routing_of_experts(module, found)
    routed = {
        "x": of_tokens(width, weight.dtype),
        "top_k_index": of_tokens(chosen or 1, torch.int64, requires_grad=False),
        "top_k_weights": of_tokens(chosen or 1, weight.dtype),
    }
    return found.tensors(module) | routed | dict(found.formula)


@torch.enable_grad()
def _facts(module: nn.Module, found: ExpertsFFN, options: dict[str, Any], on: Device | None) -> Facts:
    """What the report says of experts; no bytes if the configuration does not give the experts per token."""
    _, chosen, weight = routing_of_experts(module, found)
    batch = planned(MOE_FFN, on, weight.device, **_batch(module, found), **options)
    theirs = 0 if chosen is None else batch.plan.problem.kept_by_torch(batch.device) // TOKENS
    return batch.facts((theirs, batch.plan.saved_bytes // TOKENS) if theirs else None)


def routing_of_experts(module: nn.Module, found: ExpertsFFN) -> tuple[int, int | None, Tensor]:
    """(width of a token, experts per token or None if the configuration does not give it, a weight)."""
    weight = found.tensors(module)["w_up"]
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    width = weight.shape[1 if dict(found.formula)["transposed"] else 2]
    return width, top_k if isinstance(top_k, int) else None, weight
