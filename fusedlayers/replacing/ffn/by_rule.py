"""The classes of blocks whose FFN is described by a rule: the whole forward, or a part of a method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...kernels.activations import ACTIVATIONS
from ...modules import (
    FFNPieces,
    kept,
    outside_of_traces,
    say_once,
    traceable,
    traced_dropout_p,
    traced_ffn,
    why_not_now,
    why_not_plain_tensor,
)
from ..activations import torch_module_activation, watched_options
from ..conditions import attribute
from ..reading.rewriting import edited
from ..reading.values import ABSENT
from ..rules import FFNRule, FoundRule
from ..swapping import OWN_FORWARD, restored_method
from .blocks import FusedBlock, try_fused
from .finding import find_by_rule, identities, next_children

# (path, value) of attributes, and paths of those that are functions.
_Watched = tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]


class FusedByRule(FusedBlock):
    """Mixin of the classes made for rules: ``class Fused<Name>(FusedByRule, <Name>)``."""

    fused_rule: ClassVar[FFNRule]
    # Whether the block is the FFN and nothing else.
    fused_whole: ClassVar[bool] = False

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        rule = cls.fused_rule
        gated = attribute(module, rule.gate) is not None
        linears = (rule.up, rule.gate, rule.down) if rule.gate is not None and gated else (rule.up, rule.down)
        return {", ".join(linears): cls.why_fused_class_changed() or find_by_rule(module, rule)}

    def find_ffn(self) -> FFNPieces | str:
        """The FFN, or why it cannot be fused; cached by the block."""
        [found] = self.find_ffn_pieces(self).values()
        if isinstance(found, FFNPieces):
            rule = self.fused_rule
            options = dict(rule.conditions.options)
            options |= {f"{rule.activation_path}.{name}": None for name in watched_options(found.original)}
            names = (*rule.parts(), rule.output_dropout, "training", *dict(rule.holders), *options)
            if self.fused_whole:
                names += (*identities(self, rule), *next_children(self, rule))
            self.keep_found(found, [name for name in names if name is not None], [found], whole=self.fused_whole)
        return found

    def has_changed(self, watched: _Watched) -> bool:
        """Whether any of these attributes has changed; Dynamo guards what it reads here."""
        options, functions = watched
        for name in functions:
            # Dynamo cannot compare functions, but it guards which one is read.
            if attribute(self, name) is None:
                return True
        for name, value in options:
            now = attribute(self, name, ABSENT)
            if not isinstance(value, tuple):
                if now != value:
                    return True
                continue
            # torch 2.11's Dynamo cannot compare tuples.
            if not isinstance(now, tuple) or len(now) != len(value):
                return True
            # A generator would be one more frame for Dynamo to trace.
            for place in range(len(value)):
                if now[place] != value[place]:
                    return True
        return False

    def run_as_one_ffn(self, x: Any) -> Tensor | None:
        """The FFN of x, or None if its parts must be called."""
        if is_dynamo_compiling():
            facts, path, is_module, watched = self.traceable_ffn()
            if facts is None or self.has_changed(watched):
                return None
            y = traced_ffn(self, facts, x, None, None)
            return y if y is None or path is None else F.dropout(y, traced_dropout_p(self, path, is_module))
        found = kept(self) or self.find_ffn()
        y = try_fused(self, found, x)
        p = found.output_dropout_p if self.fused_whole and isinstance(found, FFNPieces) else 0.0
        return F.dropout(y, p) if y is not None and p else y

    @outside_of_traces
    def traceable_ffn(self) -> tuple[tuple[Any, ...] | None, str | None, bool, _Watched]:
        """What a traced call treats as constants: the FFN's facts; the path of the dropout after it, and whether that
        is a module; the attributes to watch."""
        rule, [found] = self.fused_rule, self.find_ffn_pieces(self).values()
        facts = traceable(
            self, found, up=rule.up, down=rule.down, gate=rule.gate,
            activation=None if attribute(self, rule.activation_path) is None else rule.activation_path,
            dropout=rule.dropout, recompute=self.fused_recompute, precision=self.fused_precision,
        )  # fmt: skip
        # A method that holds the FFN applies that dropout itself.
        path = rule.output_dropout if self.fused_whole else None
        options = rule.conditions.options
        functions = tuple(name for name, value in options if callable(value) and not isinstance(value, type))
        watched = tuple(each for each in options if each[0] not in functions), functions
        return facts, path, isinstance(attribute(self, path), nn.Module), watched


class FusedWholeBlock(FusedByRule):
    """Mixin for blocks whose forward is one FFN and nothing else."""

    fused_whole = True

    @classmethod
    def fused_forward(cls, original: type[nn.Module]) -> Callable[..., Any]:
        method = original.forward
        # A block whose forward takes no tensor, or more than one, keeps its class.
        _, *names = inspect.signature(method).parameters

        @functools.wraps(method)
        def forward(self: FusedWholeBlock, *args: Any, **kwargs: Any) -> Any:
            # Fast path for repeated calls.
            if len(args) == 1 and not kwargs and not is_dynamo_compiling():
                ready: FFNPieces | None = kept(self)
                if ready is not None and why_not_plain_tensor(args[0]) is None:
                    result = ready.run_instead(args[0], self.fused_recompute, self.fused_precision)
                    if result is None:
                        return method(self, *args)
                    return F.dropout(result, ready.output_dropout_p) if ready.output_dropout_p else result
            if not isinstance(self, FusedWholeBlock):
                return restored_method(self, "forward")(*args, **kwargs)
            # Dynamo guards these, so it notices a patch, too.
            if original.forward is not method:
                say_once(self, str(self.why_fused_class_changed()), OWN_FORWARD)
                return original.forward(self, *args, **kwargs)
            if len(args) + len(kwargs) == 1 and (args or names[0] in kwargs):
                y = self.run_as_one_ffn(args[0] if args else kwargs[names[0]])
                if y is not None:
                    return y
            return method(self, *args, **kwargs)

        return forward


class FusedInside(FusedByRule):
    """Mixin for blocks with an FFN inside a method, which runs with one call in place of the FFN."""

    @classmethod
    def fused_overrides(cls, original: type[nn.Module], **facts: Any) -> dict[str, Callable[..., Any]]:
        rule: FoundRule = facts["fused_rule"]
        name = str(rule.inside)
        method = getattr(original, name, None)
        if method is None:
            return {}
        fused = edited(rule.edits, method, cls.run_inside) if rule.edits else None
        read: list[tuple[Any, str, Any]] = list(rule.conditions._replace(functions=()).owned())
        # An edited method of the block is not called by its name: another one may be set on the instance.
        edits = {(each.owner, each.name) for each in rule.edits if each.owner is original}
        read += [(None, each, function) for owner, each, function in read if (owner, each) in edits]

        @functools.wraps(method)
        def with_fused_ffn(self: FusedInside, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, FusedInside):
                return restored_method(self, name)(*args, **kwargs)
            own = getattr(original, name)
            if fused is None:
                say_once(self, f"the source of {name} is another one than when it was replaced")
            if fused is None or not self.is_fused_now() or own is not method:
                return own(self, *args, **kwargs)
            # Dynamo guards these, so it notices a patch, too.
            for owner, each, function in read if is_dynamo_compiling() else ():
                now = getattr(getattr(self, each), "__func__", None) if owner is None else getattr(owner, each)
                if now is not function:
                    return own(self, *args, **kwargs)
            return fused(self, *args, **kwargs)

        return {name: with_fused_ffn}

    def is_fused_now(self) -> bool:
        """Whether the method runs with the FFN as one operation."""
        if is_dynamo_compiling():
            facts, _, _, watched = self.traceable_ffn()
            return facts is not None and not self.has_changed(watched)
        # Checks the children that hold the parts, too: they would not be called.
        found = kept(self) or why_not_now() or self.find_ffn()
        if isinstance(found, str):
            say_once(self, found)
        return not isinstance(found, str)

    def run_inside(self, x: Any) -> Any:
        """The FFN of x, in the middle of the method; calls its parts one by one if it cannot be fused for x."""
        y = self.run_as_one_ffn(x)
        if y is not None:
            return y
        rule = self.fused_rule
        up, gate, down, dropout = (attribute(self, name) for name in (rule.up, rule.gate, rule.down, rule.dropout))
        activation = rule.activation_of(self)
        if isinstance(activation, str):
            activation = ACTIVATIONS[str(torch_module_activation(activation))].torch
        hidden = up(x)
        if rule.gate_rows is not None:
            first, last = hidden.chunk(2, -1)
            hidden = activation(first) * last if rule.gate_rows == "first" else activation(last) * first
        else:
            hidden = activation(hidden) if gate is None else activation(gate(x)) * hidden
        if isinstance(dropout, nn.Module):
            hidden = dropout(hidden)
        elif dropout is not None:
            hidden = F.dropout(hidden, dropout, self.training)
        return down(hidden)
