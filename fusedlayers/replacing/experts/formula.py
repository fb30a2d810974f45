"""What the experts of a mixture compute, read from the source of their module's forward.

transformers' experts share one interface: a module holds the stacked weights of all experts, flags give their layout,
and its forward takes tokens, the experts of each token and their weights. The forward must be the loop over experts,
with a formula per expert that ``functional.moe_ffn`` can compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...modules import why_not_plain_tensor, why_not_read_past
from ..activations import torch_module_activation
from ..conditions import Conditions
from ..reading.formulas import OtherFormula, text
from ..reading.polynomials import Polynomial, activation_giving, atom, linear_result, number
from ..reading.values import NotUnderstood
from .loop import ExpertsReader, limited

# Flags that the interface sets on every instance; older releases lack the one below, and its feature.
_FLAGS = ("has_gate", "has_bias", "is_transposed")
_NORM = "has_post_expert_norm"
# Users may override it to gate in their own way; every implementation calls it.
_GATE = "_apply_gate"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The name of this library among transformers' implementations of experts.
IMPLEMENTATION = "fusedlayers"
# Implementations that compute the forward of the class, each in its own way; others may be the user's.
_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", IMPLEMENTATION)
# Not conditions: expert parallelism changes num_experts, and no expert's result depends on these.
_NOT_OPTIONS = ("training", "num_experts")
# The module of the wrapper that picks the implementation named in the configuration.
INTERFACE = "transformers.integrations.moe"
# Which columns of the merged projection are gate and up.
_LAYOUTS = {"concatenated": ("first", "last"), "interleaved": ("even", "odd")}


class ExpertsFFN(NamedTuple):
    """The FFN of every expert.

    Args:
        names: (argument of ``functional.moe_ffn``, name of the parameter).
        formula: its other arguments, by name.
        activation: the attribute that holds the activation, if one does.
        conditions: under which the forward computes this.
    """

    names: tuple[tuple[str, str], ...]
    formula: tuple[tuple[str, Any], ...]
    activation: str | None
    conditions: Conditions

    def tensors(self, module: nn.Module) -> dict[str, Any]:
        """The parameters, as arguments of ``functional.moe_ffn``."""
        return {argument: getattr(module, name) for argument, name in self.names}

    def described(self, module: nn.Module) -> str:
        """The formula and its sizes, for the report."""
        given, found = self.tensors(module), dict(self.formula)
        experts, *down = given["w_down"].shape
        hidden, width = down if found["transposed"] else reversed(down)
        gated = "gated " if "gate_up" in self.names[0][1] else ""
        limit = f" within ±{found['limit']:g}" if "limit" in found else ""
        offset = f", up + {found['up_offset']:g}" if "up_offset" in found else ""
        text = f"{gated}{found['activation']}{limit}{offset}, {experts} experts, {width} -> {hidden} -> {width}"
        return f"{', '.join(name for argument, name in self.names if argument[0] == 'w')}: {text}"


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the interface of transformers' experts."""
    return all(type(vars(module).get(flag)) is bool for flag in _FLAGS)


def eager_forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    """The author's forward, inside the wrapper that picks an implementation."""
    forward: Any = kind.forward
    # Other wrappers may compute something of their own.
    asks = getattr(forward, "__globals__", {}).get("__name__") == INTERFACE
    return forward.__wrapped__ if asks and hasattr(forward, "__wrapped__") else forward


def implementation(module: nn.Module) -> str | None:
    """The experts implementation named in the module's configuration."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def run_eagerly(model: nn.Module) -> None:
    """Make all experts in ``model`` run their eager forward: transformers' other implementations do not support
    float64."""
    for module in model.modules():
        if is_experts(module) and implementation(module) is not None:
            cast(Any, module).config._experts_implementation = "eager"


def find_experts(module: nn.Module) -> ExpertsFFN | str:
    """The FFN of a module with the interface of experts, or why it cannot be fused."""
    if implementation(module) not in _IMPLEMENTATIONS:
        return f"its configuration asks for experts_implementation={implementation(module)!r}"
    if getattr(module, _NORM, False):
        return "a norm follows every expert"
    names = _names(module)
    for holder in (module._parameters, module._buffers):
        for name in holder:
            if holder[name] is not None and name not in dict(names).values():
                return f"it has a tensor {name!r} that is no part of the experts' FFN"
    if reason := why_other_tensors(module, names):
        return reason
    try:
        return _read(module, names)
    except OtherFormula as reason:
        return str(reason)
    except NotUnderstood as reason:
        return f"its forward {reason}"


def _names(module: Any) -> tuple[tuple[str, str], ...]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (("w_up", up), ("w_down", "down_proj"))
    return (*names, ("b_up", f"{up}_bias"), ("b_down", "down_proj_bias")) if module.has_bias else names


def why_other_tensors(module: nn.Module, names: Sequence[tuple[str, str]]) -> str | None:
    """Why ``functional.moe_ffn`` cannot read the parameters, or None."""
    first: Tensor | None = None
    for argument, name in names:
        tensor = getattr(module, name, None)
        if not isinstance(tensor, Tensor):
            return f"it has no parameter {name!r}"
        if reason := why_not_plain_tensor(tensor):
            return f"its {name} {reason}"
        if tensor.dim() != (3 if argument[0] == "w" else 2):
            return f"its {name} has the shape {list(tensor.shape)}"
        first = tensor if first is None else first
        if tensor.dtype not in _DTYPES or tensor.dtype is not first.dtype or tensor.device != first.device:
            return f"its {name} is of {tensor.dtype} on {tensor.device}"
    return None


def why_not_as_found(module: nn.Module, found: ExpertsFFN) -> str | None:
    """What has changed since the experts' FFN was read, or None."""
    if _GATE in module.__dict__:
        return f"has an {_GATE} of its own, set on the instance"
    if reason := found.conditions.why_changed(module):
        return reason
    if found.activation is not None:
        activation = getattr(module, found.activation, None)
        if torch_module_activation(activation) != found.formula[0][1]:
            return f"its {found.activation} is another one than when it was replaced"
        if isinstance(activation, nn.Module) and (reason := why_not_read_past(activation)):
            return f"its {found.activation} {reason}"
    return why_other_tensors(module, found.names)


def _read(module: Any, names: tuple[tuple[str, str], ...]) -> ExpertsFFN:
    """The FFN that the source of the forward computes.

    Raises:
        NotUnderstood: it computes something else.
    """
    forward = eager_forward(type(module))
    if hasattr(forward, "__wrapped__") or len(inspect.signature(forward).parameters) != 4:
        raise NotUnderstood("does not take tokens, experts and weights alone")
    down = module.down_proj
    reader = ExpertsReader(module, down.shape[2 if module.is_transposed else 1])
    expert = reader.expert(forward)
    if expert.transposed is not module.is_transposed:
        raise NotUnderstood(f"multiplies otherwise than is_transposed={module.is_transposed} says")
    biases = {given: bias for given, bias in names if given[0] == "b"}
    if expert.biases != ({names[0][1]: biases["b_up"], names[1][1]: biases["b_down"]} if biases else {}):
        raise NotUnderstood(f"adds the biases {sorted(expert.biases.values())}, has_bias={module.has_bias}")
    last = expert.value.single
    if last is None or last[:2] != ("linear", names[1][1]):
        raise OtherFormula(f"its experts give {text(expert.value)}, which {names[1][1]} does not")
    formula, activated = _matching(module, names[0][1], last[2], reader.watched)  # type: ignore[arg-type]
    activation = reader.path_of(formula["activation"], activated)
    conditions = Conditions.of(reader, _NOT_OPTIONS, activation)
    if dotted := next((path for path, _ in conditions.options if "." in path), None):
        raise NotUnderstood(f"reads {dotted}")
    return ExpertsFFN(names, tuple(formula.items()), activation, conditions)


def _matching(module: Any, up: str, hidden: Polynomial, options: dict[str, Any]) -> tuple[dict[str, Any], Polynomial]:
    """The arguments of ``functional.moe_ffn`` that give this hidden, activation first, and the activation's input."""
    x = atom("input", "x")
    both = linear_result(up, x)
    limits = [float(value) for value in options.values() if type(value) in (int, float) and 0 < value < float("inf")]
    for layout, halves in _LAYOUTS.items() if module.has_gate else (("separate", None),):
        gate, rest = (both, number(1.0)) if halves is None else (atom("half", both.single, half) for half in halves)
        for limit in (None, *dict.fromkeys(limits)) if module.has_gate else (None,):
            activated, factor = gate, rest
            if limit is not None:
                activated, factor = limited(gate, "at most", limit), limited(rest, "within", limit)
            for offset in (0.0, 1.0) if limit is not None else (0.0,):
                name = activation_giving(hidden, activated, factor + number(offset))
                if name not in (None, "identity"):
                    formula = {"activation": name, "gate_and_up": layout, "transposed": module.is_transposed}
                    formula |= {} if limit is None else {"limit": limit}
                    return formula | ({"up_offset": offset} if offset else {}), activated
    raise OtherFormula(f"the hidden of its experts is {text(hidden)}, of no known activation and gate")
