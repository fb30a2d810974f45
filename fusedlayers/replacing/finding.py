"""Which parts of a module make one FFN, and why some do not: activations, dropout, runs in a sequence, rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..kernels.activations import ACTIVATIONS, ALIASES, LEAKY_SLOPE, canonical_activation
from ..modules import FFNPieces, class_name, class_path, linear_weight, why_must_be_called, why_not_read_past
from .rules import FFNRule

_ACTIVATION_CLASSES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}
# Classes of other libraries, by where they are imported from; what they write out in Python is the same formula.
_ACTIVATION_PATHS: dict[str, str] = {
    f"{module}.{name}": activation
    for module, names in {
        "transformers.activations": {
            "GELUActivation": "gelu",
            "GELUTanh": "gelu_tanh",
            "PytorchGELUTanh": "gelu_tanh",
            "NewGELUActivation": "gelu_tanh",
            "FastGELUActivation": "gelu_tanh",
            "AccurateGELUActivation": "gelu_tanh",
            "QuickGELUActivation": "quick_gelu",
            "SiLUActivation": "silu",
            "ReLUSquaredActivation": "relu2",
            "LinearActivation": "identity",
        },
        "timm.layers.activations": {
            "GELU": "gelu",
            "GELUTanh": "gelu_tanh",
            "QuickGELU": "quick_gelu",
            "Swish": "silu",
            "Sigmoid": "sigmoid",
            "Tanh": "tanh",
        },
    }.items()
    for name, activation in names.items()
}
_ACTIVATION_FUNCTIONS: dict[Callable[..., Tensor], str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.leaky_relu: "leaky_relu",
}


def torch_module_activation(activation: object) -> str | None:
    """Our name of an activation (a module of torch, transformers or timm, a torch function, a name); None: unknown."""
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
        return _ACTIVATION_CLASSES.get(type(activation)) or _ACTIVATION_PATHS.get(class_path(type(activation)))
    if callable(activation) and isinstance(activation, Hashable):
        return _ACTIVATION_FUNCTIONS.get(activation)
    return None


def _gelu(approximate: str) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


_MISSING = object()


def attribute(block: nn.Module, name: str | None, default: Any = None) -> Any:
    """The part of ``block`` with this name, which may have dots; ``default`` where there is none."""
    if name is None:
        return default
    if "." not in name:
        return getattr(block, name, default)
    part: Any = block
    for step in name.split("."):
        part = getattr(part, step, default)
    return part


def dropout_p(name: str, dropout: object, training: bool) -> float | str:
    """The probability that ``dropout`` (an ``nn.Dropout``, a number or None) has now, or why it must be called."""
    if dropout is None:
        return 0.0
    if type(dropout) is nn.Dropout:
        if reason := why_not_read_past(dropout):
            return f"the {name} {reason}"
        p, active = dropout.p, dropout.training
    elif isinstance(dropout, (int, float)) and not isinstance(dropout, bool):
        p, active = float(dropout), training
    else:
        return f"the {name} is a {class_name(dropout)}, not an nn.Dropout"
    if not 0 <= p < 1:
        return f"the {name} has p={p}, outside [0, 1)"
    return p if active else 0.0


def find_ffn(
    up: nn.Module,
    down: nn.Module,
    gate: nn.Module | None,
    activation: object,
    dropout: object,
    training: bool,
    output_dropout_p: float = 0.0,
) -> FFNPieces | str:
    """The FFN made of these parts as they are now, or why it cannot be fused."""
    name = torch_module_activation(activation)
    if name is None:
        given = repr(activation) if isinstance(activation, (str, nn.Module)) else getattr(activation, "__name__", "")
        return f"the activation {given or class_name(activation)} is not a known one"
    if isinstance(activation, nn.Module) and (reason := why_not_read_past(activation)):
        return f"the activation {reason}"
    p = dropout_p("dropout", dropout, training)
    if isinstance(p, str):
        return p
    pieces = FFNPieces(up, down, gate, name, p, activation, output_dropout_p)
    if reason := pieces.why_not_plain():
        return reason
    # torch.jit would write the comparisons down, and warn; it calls the children anyway.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return pieces
    w_up, w_down, w_gate = (linear_weight(linear) for linear in (up, down, gate or up))
    if w_down.shape[1] != w_up.shape[0] or w_gate.shape != w_up.shape:
        gated = "" if gate is None else f", gate {tuple(w_gate.shape)}"
        return f"the weights do not fit together: up {tuple(w_up.shape)}{gated}, down {tuple(w_down.shape)}"
    # torch accepts such a block under autocast; then it is for torch to run it.
    if not (w_up.dtype == w_down.dtype == w_gate.dtype and w_up.device == w_down.device == w_gate.device):
        return "the linears differ in dtype or device"
    return pieces


def widths(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear layer of any making; None for anything else."""
    pair = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return cast("tuple[int, int]", pair) if all(isinstance(width, int) for width in pair) else None


def _holds_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer of any making, or wraps one, as LoRA does."""
    if isinstance(module, nn.Linear):
        return True
    return widths(module) is not None or any(isinstance(child, nn.Linear) for child in module.children())


def find_runs(modules: Sequence[nn.Module]) -> Iterator[tuple[int, int, FFNPieces | str]]:
    """(start, stop, FFN or reason) of every linear, activation, [dropout,] linear in a row; FFNs are disjoint."""
    free = 0
    for start in range(len(modules) - 2):
        up, activation, third = modules[start : start + 3]
        dropout = third if isinstance(third, _DropoutNd) else None
        stop = start + (3 if dropout is None else 4)
        if start < free or stop > len(modules):
            continue
        down = modules[stop - 1]
        if not (_holds_linear(up) and _holds_linear(down)):
            continue
        # Two bare linears name a pair whatever is between them; two wrappers only around an activation.
        bare = widths(up) is not None and widths(down) is not None and not _holds_linear(activation)
        if torch_module_activation(activation) is not None or bare:
            found = find_ffn(up, down, None, activation, dropout, False)
            free = start if isinstance(found, str) else stop
            yield start, stop, found


def find_by_rule(block: nn.Module, rule: FFNRule) -> FFNPieces | str:
    """The FFN of ``block`` as ``rule`` describes it, or why it cannot be fused."""
    up, down, gate = (attribute(block, name) for name in (rule.up, rule.down, rule.gate))
    dropout, output_dropout = attribute(block, rule.dropout), attribute(block, rule.output_dropout)
    activation = attribute(block, rule.activation, rule.activation)
    if not isinstance(up, nn.Module) or not isinstance(down, nn.Module):
        return f"the rule's up={rule.up!r} or down={rule.down!r} is no child of the block"
    if gate is not None and not isinstance(gate, nn.Module):
        return f"the rule's gate={rule.gate!r} is no child of the block"
    for name in (rule.dropout, rule.output_dropout):
        if name is not None and attribute(block, name, _MISSING) is _MISSING:
            return f"the rule's dropout {name!r} is no attribute of the block"
    if rule.inside is None:
        reason = _why_not_whole(block, (up, down, gate, activation, dropout, output_dropout))
    else:
        reason = _why_not_inside(block, rule, activation)
    if reason is not None:
        return reason
    p = output_dropout_p(block, rule)
    return p if isinstance(p, str) else find_ffn(up, down, gate, activation, dropout, block.training, p)


def _why_not_whole(block: nn.Module, parts: tuple[object, ...]) -> str | None:
    """What the block holds besides the parts of its FFN, or None."""
    named = {id(part) for part in parts}
    for name, child in block._modules.items():
        if child is not None and id(child) not in named and type(child) is not nn.Identity:
            return f"the block has a child {name!r} that the rule does not name"
    for name, tensor in (*block._parameters.items(), *block._buffers.items()):
        if tensor is not None:
            return f"the block has a tensor {name!r} of its own"
    return None


def _why_not_inside(block: nn.Module, rule: FFNRule, activation: object) -> str | None:
    """Why no stand-ins may take the place of the parts of the FFN inside the rule's method, or None."""
    for name, path in rule.holder_paths:
        holder = attribute(block, name)
        if class_path(type(holder)) != path:
            return f"its {name} is a {class_name(holder)}, not {path}"
        if reason := why_must_be_called(holder):
            return f"its {name} {reason}"
    if activation is rule.activation:
        return f"the rule's activation {rule.activation!r} is no attribute of the block"
    return None


def output_dropout_p(block: nn.Module, rule: FFNRule) -> float | str:
    """The probability of the dropout after ``down``, or why it must be called."""
    return dropout_p("output dropout", attribute(block, rule.output_dropout), block.training)
