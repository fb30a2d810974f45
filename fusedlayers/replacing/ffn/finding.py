"""Which parts of a module form an FFN, and why some do not: activations, dropout, runs in a sequence, rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ...modules import (
    FFNPieces,
    class_name,
    class_path,
    ffn_pieces,
    linear_weight,
    why_must_be_called,
    why_not_read_past,
)
from ..activations import glu_of, torch_module_activation
from ..conditions import attribute
from ..reading.sizes import widths
from ..reading.values import ABSENT
from ..rules import FFNRule


def dropout_p(name: str, dropout: object, training: bool) -> float | str:
    """The current probability of ``dropout`` (an ``nn.Dropout``, a number or None), or why it must be called."""
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
    gate_rows: str | None = None,
    glu: str | None = None,
) -> FFNPieces | str:
    """The FFN of these parts as they are now, or why it cannot be fused. ``glu``: the activation is a GLU, of this."""
    if isinstance(activation, nn.Module) and (reason := why_not_read_past(activation)):
        return f"the activation {reason}"
    name = glu or torch_module_activation(activation)
    if name is None:
        given = repr(activation) if isinstance(activation, (str, nn.Module)) else getattr(activation, "__name__", "")
        return f"the activation {given or class_name(activation)} is not a known one"
    p = dropout_p("dropout", dropout, training)
    if isinstance(p, str):
        return p
    pieces = ffn_pieces(up, down, gate, name, p, activation, output_dropout_p, gate_rows)
    if reason := pieces.why_not_plain():
        return reason
    # torch.jit would record these comparisons, with a warning; it calls the children anyway.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return pieces
    w_up, w_down, w_gate = (linear_weight(linear) for linear in (up, down, gate or up))
    outputs = w_down.shape[1] * (1 if gate_rows is None else 2)
    if outputs != w_up.shape[0] or w_gate.shape != w_up.shape:
        gated = " with the gate" if gate_rows else "" if gate is None else f", gate {tuple(w_gate.shape)}"
        return f"the weights do not fit together: up {tuple(w_up.shape)}{gated}, down {tuple(w_down.shape)}"
    # torch can run such a block under autocast, so leave it to torch.
    if not (w_up.dtype == w_down.dtype == w_gate.dtype and w_up.device == w_down.device == w_gate.device):
        return "the linears differ in dtype or device"
    return pieces


def _holds_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer of any class, or wraps one, as LoRA does."""
    if isinstance(module, nn.Linear):
        return True
    return widths(module) is not None or any(isinstance(child, nn.Linear) for child in module.children())


def find_runs(modules: Sequence[nn.Module]) -> Iterator[tuple[int, int, FFNPieces | str]]:
    """(start, stop, FFN or reason) of each run of linear, activation or GLU, [dropout,] linear; they do not overlap."""
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
        # Two bare linears count as a pair whatever is between them, two wrappers only around an activation.
        bare = widths(up) is not None and widths(down) is not None and not _holds_linear(activation)
        if torch_module_activation(activation) is not None or bare:
            glu, gate_rows = (_glu_between(up, activation, down) if bare else None) or (None, None)
            found = find_ffn(up, down, None, activation, dropout, False, gate_rows=gate_rows, glu=glu)
            free = start if isinstance(found, str) else stop
            yield start, stop, found


def _glu_between(up: nn.Module, module: nn.Module, down: nn.Module) -> tuple[str, str] | None:
    """:func:`.activations.glu_of` for a module between two linears whose widths tell that it may be a GLU."""
    into, out = widths(up), widths(down)
    if into is None or out is None or into[1] != 2 * out[0]:
        return None
    return glu_of(module, into[1])


def find_by_rule(block: nn.Module, rule: FFNRule) -> FFNPieces | str:
    """The FFN of ``block`` as ``rule`` describes it, or why it cannot be fused."""
    up, down, gate = (attribute(block, name) for name in (rule.up, rule.down, rule.gate))
    dropout = attribute(block, rule.dropout)
    activation = rule.activation_of(block)
    if not isinstance(up, nn.Module) or not isinstance(down, nn.Module):
        return f"the rule's up={rule.up!r} or down={rule.down!r} is no child of the block"
    if gate is not None and not isinstance(gate, nn.Module):
        return f"the rule's gate={rule.gate!r} is no child of the block"
    for name in (rule.dropout, rule.output_dropout):
        if name is not None and attribute(block, name, ABSENT) is ABSENT:
            return f"the rule's dropout {name!r} is no attribute of the block"
    reason = rule.conditions.why_changed(block) or why_not_held(block, rule)
    if reason is None and rule.inside is None:
        reason = why_not_whole(block, rule)
    if reason is not None:
        return reason
    after = dropout_p("output dropout", attribute(block, rule.output_dropout), block.training)
    if isinstance(after, str):
        if rule.inside is None:
            return after
        # The method calls this module, whatever it is; its probability is only for the report.
        after = 0.0
    return find_ffn(up, down, gate, activation, dropout, block.training, after, rule.gate_rows)


def identities(block: nn.Module, rule: FFNRule) -> tuple[str, ...]:
    """The paths of the nn.Identity modules of a block and of the holders of its FFN's parts: hooks may be attached to
    them."""
    holders = [("", block), *((f"{name}.", attribute(block, name)) for name, _ in rule.holder_paths)]
    return tuple(
        f"{path}{name}" for path, holder in holders for name, child in holder._modules.items()
        if type(child) is nn.Identity
    )  # fmt: skip


def next_children(block: nn.Module, rule: FFNRule) -> tuple[str, ...]:
    """The path of the next element of each module list that holds parts of an FFN, to notice when one is appended."""
    holders = [(name, attribute(block, name)) for name, _ in rule.holder_paths]
    return tuple(f"{name}.{len(each)}" for name, each in holders if isinstance(each, (nn.ModuleList, nn.Sequential)))


def why_not_whole(block: nn.Module, rule: FFNRule) -> str | None:
    """A child or tensor of the block that is no part of its FFN, as a reason; None if there is none."""
    for path in identities(block, rule):
        if reason := why_not_read_past(attribute(block, path)):
            return f"its {path} {reason}"
    holders = [attribute(block, name) for name, _ in rule.holder_paths]
    parts = [attribute(block, name) for name in (*rule.parts(), rule.output_dropout)]
    named = {id(part) for part in (*parts, *holders)}
    for owner in (block, *holders):
        for name, child in owner._modules.items():
            if child is not None and id(child) not in named and type(child) is not nn.Identity:
                return f"the block has a child {name!r} that the rule does not name"
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                return f"the block has a tensor {name!r} of its own"
    return None


def why_not_held(block: nn.Module, rule: FFNRule) -> str | None:
    """Why the children that hold the FFN's parts must be called themselves, or None."""
    for name, path in rule.holder_paths:
        holder = attribute(block, name)
        if class_path(type(holder)) != path:
            return f"its {name} is a {class_name(holder)}, not {path}"
        if reason := why_must_be_called(holder):
            return f"its {name} {reason}"
    return None
