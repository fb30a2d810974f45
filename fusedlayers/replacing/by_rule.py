"""The mixins of the classes that `replace` gives to blocks that a rule describes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..modules import (
    FFNPieces,
    is_plain_now,
    kept,
    outside_of_traces,
    part_of,
    say_once,
    traced_dropout_p,
    traced_ffn,
    why_not_now,
)
from .activations import torch_module_activation
from .blocks import OWN_FORWARD, FusedOneFFN, restored_method, try_fused
from .finding import attribute, find_by_rule
from .rules import FoundRule
from .stand_ins import InsideFFN, Places
from .uncomputed import computed

# Attributes by path, with what each of them was.
_Watched = tuple[tuple[str, Any], ...]


class FusedByRule(FusedOneFFN):
    """Mixin of the classes made for rules: ``class Fused<Name>(FusedByRule, <Name>)``."""

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        rule = cls.fused_rule
        gated = attribute(module, rule.gate) is not None
        linears = (rule.up, rule.gate, rule.down) if rule.gate is not None and gated else (rule.up, rule.down)
        return {", ".join(linears): cls.why_fused_class_changed() or find_by_rule(module, rule)}

    @classmethod
    def fused_watched_parts(cls) -> _Watched:
        """The attributes that were read for the rule."""
        rule = cls.fused_rule
        return rule.options if isinstance(rule, FoundRule) else ()

    def has_changed(self, watched: _Watched) -> bool:
        """Whether any of this is another one now; Dynamo guards what it reads here.

        It cannot compare functions: one that is patched after compiling is noticed when the block is traced again.
        """
        # A generator would be a frame more for Dynamo to trace.
        for name, value in watched:  # noqa: SIM110
            if part_of(self, name) != value:
                return True
        return False


class FusedWholeBlock(FusedByRule):
    """Mixin for blocks whose forward is one FFN and nothing else."""

    fused_whole = True

    @classmethod
    def fused_forward(cls, original: type[nn.Module]) -> Callable[..., Any]:
        method = original.forward
        # Blocks whose forward takes no tensor, or more than one, keep their class.
        _, *names = inspect.signature(method).parameters

        @functools.wraps(method)
        def forward(self: FusedWholeBlock, *args: Any, **kwargs: Any) -> Any:
            # The shortest way for the call that comes again and again.
            if len(args) == 1 and not kwargs and not is_dynamo_compiling():
                ready: FFNPieces | None = kept(self)
                if ready is not None and is_plain_now(args[0]):
                    result = ready.run(args[0], None, self.fused_recompute)
                    if result is None:
                        return method(self, *args)
                    return F.dropout(result, ready.output_dropout_p) if ready.output_dropout_p else result
            if not isinstance(self, FusedWholeBlock):
                return restored_method(self, "forward")(*args, **kwargs)
            # Dynamo guards these, and so notices a patch, too.
            if original.forward is not method:
                say_once(self, str(self.why_fused_class_changed()), OWN_FORWARD)
                return original.forward(self, *args, **kwargs)
            if len(args) + len(kwargs) == 1 and (args or names[0] in kwargs):
                y = self.run_as_one_ffn(args[0] if args else kwargs[names[0]])
                if y is not None:
                    return y
            return method(self, *args, **kwargs)

        return forward

    def run_as_one_ffn(self, x: Any) -> Tensor | None:
        """The whole block for x, or None where the original forward must run."""
        if is_dynamo_compiling():
            facts, path, is_module, watched = self.traceable_block()
            if self.has_changed(watched):
                return None
            y = None if facts is None else traced_ffn(self, facts, x, None, None)
            return y if y is None or path is None else F.dropout(y, traced_dropout_p(self, path, is_module))
        found = self.find_ffn()
        y = try_fused(self, found, x)
        p = found.output_dropout_p if isinstance(found, FFNPieces) else 0.0
        return F.dropout(y, p) if y is not None and p else y

    @outside_of_traces
    def traceable_block(self) -> tuple[tuple[Any, ...] | None, str | None, bool, _Watched]:
        """What a traced call takes for constants: of the FFN, where the dropout behind it is, and what is watched."""
        rule = self.fused_rule
        path = rule.output_dropout
        return self.traceable_ffn(), path, isinstance(attribute(self, path), nn.Module), self.fused_watched_parts()


class FusedInside(FusedByRule):
    """Mixin for blocks with an FFN inside a method, which runs as it is on a stand-in for the block."""

    @classmethod
    def fused_overrides(cls, original: type[nn.Module], **facts: Any) -> dict[str, Callable[..., Any]]:
        name: str = facts["fused_rule"].inside
        method = getattr(original, name, None)
        if method is None:
            return {}

        @functools.wraps(method)
        def on_stand_in(self: FusedInside, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, FusedInside):
                return restored_method(self, name)(*args, **kwargs)
            return self.run_with_fused_ffn(getattr(original, name), args, kwargs)

        return {name: on_stand_in}

    def run_with_fused_ffn(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the method of the original class returns, with the FFN inside fused where it can be."""
        if is_dynamo_compiling():
            facts, places, inplace, function, rows, watched = self.traceable_inside()
            if facts is None or self.has_changed(watched):
                return method(self, *args, **kwargs)
            run: Callable[[Tensor, float], Tensor | None] = functools.partial(self._run_traced, facts)
        else:
            # Of the children that hold parts, too, whose calls a stand-in would not make.
            found = why_not_now() or self.find_kept_ffn()
            if isinstance(found, str):
                say_once(self, found)
                return method(self, *args, **kwargs)
            run = functools.partial(self._run_found, found)
            places, inplace = self.fused_rule.inside_places, getattr(found.original, "inplace", False)
            function = None if found.original is not self.fused_rule.activation else found.activation
            rows = found.gate_rows
        ffn = InsideFFN(self, places, inplace, run, self._say_otherwise, function, rows)
        return computed(method(ffn.stand_in(), *args, **kwargs), "as a result")

    @outside_of_traces
    def traceable_inside(self) -> tuple[tuple[Any, ...] | None, Places, bool, str | None, str | None, _Watched]:
        """What a traced call takes for constants: of the FFN, then what :class:`InsideFFN` takes."""
        rule = self.fused_rule
        activation = attribute(self, rule.activation)
        function = torch_module_activation(rule.activation) if activation is None else None
        inplace = getattr(activation, "inplace", False)
        return self.traceable_ffn(), rule.inside_places, inplace, function, rule.gate_rows, self.fused_watched_parts()

    def find_kept_ffn(self) -> FFNPieces | str:
        """The FFN, or why it is not fused: as it was found before, while nothing has changed since."""
        found: FFNPieces | str | None = kept(self)
        if found is not None:
            return found
        return self.why_fused_class_changed() or self.find_ffn()

    def _run_found(self, found: FFNPieces, x: Tensor, dropout_p: float) -> Tensor | None:
        return try_fused(self, found.with_dropout(dropout_p), x)

    def _run_traced(self, facts: tuple[Any, ...], x: Tensor, dropout_p: float) -> Tensor | None:
        return traced_ffn(self, facts, x, None, dropout_p)

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """As of every block; and how a call before used the hidden, if not as the rule says."""
        return super().why_called(*tensors) or self.used_otherwise()

    def used_otherwise(self) -> str | None:
        """How a call before used the hidden, if not as the rule says: then it was computed by the original parts."""
        return _otherwise.get(type(self))

    def _say_otherwise(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            _otherwise[type(self)] = reason
        say_once(self, reason)


# Classes whose methods used the hidden otherwise than their rules say -> how.
_otherwise: weakref.WeakKeyDictionary[type[nn.Module], str] = weakref.WeakKeyDictionary()
