"""Which parts of a module make one FFN, and why some do not: activations, dropout, runs in a sequence, rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..kernels.activations import ACTIVATIONS, ALIASES, LEAKY_SLOPE, canonical_activation
from ..modules import FFNPieces, class_name, why_must_be_called

_ACTIVATION_CLASSES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
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
    """Our name of an activation given as a torch module, a torch function or a name; None if it is not one of ours."""
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
        return _ACTIVATION_CLASSES.get(type(activation))
    if callable(activation) and isinstance(activation, Hashable):
        return _ACTIVATION_FUNCTIONS.get(activation)
    return None


def _gelu(approximate: str) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


@dataclass(frozen=True)
class FFNRule:
    """Says that a class computes ``down(dropout(act(up(x))))``, or gated ``down(dropout(act(gate(x)) * up(x)))``.

    A rule is data: the class, and the names of attributes of its instances. Its formula is believed, but a block that
    holds children, parameters or buffers which the rule does not name must compute more than that, and is left alone.

    Args:
        module_class: the class of the block; instances of a subclass are left alone.
        up, down: the linears into and out of the hidden.
        activation: the attribute that holds the activation (a module, a function or a name); where the block has no
            such attribute, the name of the activation itself.
        gate: the linear that is activated and multiplied in; a block whose attribute is absent or None is not gated.
        dropout: of the hidden: an ``nn.Dropout``, or a float that applies in training. None: there is none.
        output_dropout: the same, after ``down``.

    Raises:
        TypeError: ``module_class`` is not a subclass of ``nn.Module``, or another argument is not the name of one.
    """

    module_class: type[nn.Module]
    _: KW_ONLY
    up: str
    down: str
    activation: str = "activation"
    gate: str | None = None
    dropout: str | None = None
    output_dropout: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.module_class, type) and issubclass(self.module_class, nn.Module)):
            raise TypeError(f"module_class must be a subclass of nn.Module, got {self.module_class!r}")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not isinstance(value, str) and not (value is None and field.default is None):
                raise TypeError(f"{field.name} must be the name of an attribute (str), got {value!r}")


def _attribute(block: nn.Module, name: str | None) -> object:
    return None if name is None else getattr(block, name, None)


def dropout_p(name: str, dropout: object, training: bool) -> float | str:
    """The probability that ``dropout`` (an ``nn.Dropout``, a float or None) has now, or why it must be called."""
    if dropout is None:
        return 0.0
    if type(dropout) is nn.Dropout:
        if reason := why_must_be_called(dropout):
            return f"the {name} {reason}"
        p, active = dropout.p, dropout.training
    elif isinstance(dropout, float):
        p, active = dropout, training
    else:
        return f"the {name} is a {class_name(dropout)}, not an nn.Dropout"
    if not 0 <= p < 1:
        return f"the {name} has p={p}, outside [0, 1)"
    return p if active else 0.0


def find_ffn(
    up: nn.Module, down: nn.Module, gate: nn.Module | None, activation: object, dropout: object, training: bool
) -> FFNPieces | str:
    """The FFN made of these parts as they are now, or why it cannot be fused."""
    name = torch_module_activation(activation)
    if name is None:
        given = repr(activation) if isinstance(activation, (str, nn.Module)) else getattr(activation, "__name__", "")
        return f"the activation {given or class_name(activation)} is not a known one"
    if isinstance(activation, nn.Module) and (reason := why_must_be_called(activation)):
        return f"the activation {reason}"
    p = dropout_p("dropout", dropout, training)
    if isinstance(p, str):
        return p
    pieces = FFNPieces(up, down, gate, name, p)
    if reason := pieces.why_not_plain():
        return reason
    w_up, w_down, w_gate = (cast(Tensor, linear.weight) for linear in (up, down, gate or up))
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
    up, down, gate = (_attribute(block, name) for name in (rule.up, rule.down, rule.gate))
    dropout, output_dropout = _attribute(block, rule.dropout), _attribute(block, rule.output_dropout)
    activation = getattr(block, rule.activation, rule.activation)
    if not isinstance(up, nn.Module) or not isinstance(down, nn.Module):
        return f"the rule's up={rule.up!r} or down={rule.down!r} is no child of the block"
    if gate is not None and not isinstance(gate, nn.Module):
        return f"the rule's gate={rule.gate!r} is no child of the block"
    for name in (rule.dropout, rule.output_dropout):
        if name is not None and not hasattr(block, name):
            return f"the rule's dropout {name!r} is no attribute of the block"
    named = {id(part) for part in (up, down, gate, activation, dropout, output_dropout)}
    for name, child in block._modules.items():
        if child is not None and id(child) not in named and type(child) is not nn.Identity:
            return f"the block has a child {name!r} that the rule does not name"
    for name, tensor in (*block._parameters.items(), *block._buffers.items()):
        if tensor is not None:
            return f"the block has a tensor {name!r} of its own"
    p = output_dropout_p(block, rule)
    return p if isinstance(p, str) else find_ffn(up, down, gate, activation, dropout, block.training)


def output_dropout_p(block: nn.Module, rule: FFNRule) -> float | str:
    """The probability of the dropout after ``down``, or why it must be called."""
    return dropout_p("output dropout", _attribute(block, rule.output_dropout), block.training)
