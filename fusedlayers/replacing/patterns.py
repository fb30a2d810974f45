"""Which class `replace` gives to a module: by a built-in pattern, by a user's rule, or by what its source computes."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Literal, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..modules import FFNPieces, FusedFFN, class_path, patched_method
from .blocks import (
    FusedBlock,
    FusedSequentialFFN,
    FusedTransformerDecoderLayer,
    FusedTransformerEncoderLayer,
    FusedTransformerLayer,
    fused_class,
)
from .by_rule import FusedInside, FusedWholeBlock
from .finding import find_runs
from .heads import FusedLossHead
from .known_rules import KNOWN_RULES
from .recognising import checked, recognise
from .rules import FFNRule
from .signatures import signature
from .unnamed import why_unnamed

_BUILT_IN: dict[type[nn.Module], type[FusedBlock]] = {
    nn.Sequential: FusedSequentialFFN,
    nn.TransformerEncoderLayer: FusedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: FusedTransformerDecoderLayer,
}


def _are_of_one_class(rule: FFNRule, other: FFNRule) -> bool:
    """Whether two rules are for one class. Two classes are compared themselves: those defined in functions may share a
    path."""
    if isinstance(rule.module_class, type) and isinstance(other.module_class, type):
        return rule.module_class is other.module_class
    return rule.class_path == other.class_path


class Patterns:
    """The built-in patterns, the user's rules, and what the sources of other modules compute.

    Ask about the innermost modules first: the linears of one FFN are not part of another.

    Raises:
        ValueError: two rules for one class, or a rule for a class that needs none.
    """

    def __init__(
        self, rules: Sequence[FFNRule], recompute: Literal["auto"] | bool | int, precision: str | None = None
    ) -> None:
        self.rules: dict[type[nn.Module] | str, FFNRule] = {}
        self.recompute, self.precision = recompute, precision
        # The linears of the FFNs found so far, fused or not.
        self.taken: set[nn.Module] = set()
        # What modules of equal signature compute, and what each module computes.
        self._alike: dict[Hashable, FFNRule | str | None] = {}
        self._found: dict[nn.Module, FFNRule | str | None] = {}
        # Modules whose rule contradicts their source -> what the source computes.
        self._refused: dict[nn.Module, str] = {}
        known = {class_path(kind) for kind in _BUILT_IN}
        for rule in rules:
            kind = rule.module_class
            needless = isinstance(kind, type) and issubclass(kind, (FusedBlock, FusedFFN))
            twice = any(_are_of_one_class(rule, other) for other in self.rules.values())
            if needless or rule.class_path in known or twice:
                name = kind if isinstance(kind, str) else kind.__qualname__
                raise ValueError(f"rules: {name} needs no rule, or has one already")
            self.rules[kind] = rule

    def rule_for(self, module: nn.Module) -> FFNRule | None:
        """The rule for a module: the user's or ours for exactly its class, or one read from its source."""
        if rule := KNOWN_RULES.get(class_path(type(module))):
            return rule
        found = self._recognised(module)
        return found if isinstance(found, FFNRule) else None

    def trusts(self, module: nn.Module) -> bool:
        """Whether a user's rule for the module is trusted without reading its source."""
        rule = self._rule_of_the_user(type(module))
        return rule is not None and rule.trusted

    def _recognised(self, module: nn.Module) -> FFNRule | str | None:
        """What a module computes, or why it is left; None: nothing to report."""
        if module not in self._found:
            self._found[module] = self._recognise(module)
        return self._found[module]

    def _recognise(self, module: nn.Module) -> FFNRule | str | None:
        kind = type(module)
        if rule := self._rule_of_the_user(kind):
            return rule if rule.trusted and rule.inside is None else self._checked(module, rule)
        of_torch = kind.__module__.startswith("torch.nn.") and kind is not nn.Sequential
        known = isinstance(module, (FusedBlock, FusedFFN, FusedLossHead, torch.jit.ScriptModule))
        if of_torch or known or kind.forward is nn.Module.forward or not module._modules:
            return None
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return "its sizes are not known before its first call"
        key = signature(module, self.taken)
        if key not in self._alike:
            self._alike[key] = recognise(module, self.taken)
        return self._alike[key]

    def _checked(self, module: nn.Module, rule: FFNRule) -> FFNRule | str:
        key = signature(module, set())
        if key not in self._alike:
            self._alike[key] = checked(module, rule)
        found = self._alike[key]
        if not isinstance(found, str):
            return cast(FFNRule, found)
        self._refused[module] = reason = f"its FFNRule is refused: {found}"
        return reason

    def _rule_of_the_user(self, kind: type[nn.Module]) -> FFNRule | None:
        return self.rules.get(kind) or self.rules.get(class_path(kind))

    def fused_class(self, module: nn.Module) -> type[FusedBlock] | None:
        """The class to give to ``module``, or None."""
        kind = type(module)
        built_in = _BUILT_IN.get(kind)
        if built_in is not None and not (kind is nn.Sequential and self.is_one_ffn(module)):
            if self.recompute == built_in.fused_recompute and self.precision is None:
                return built_in
            return fused_class(built_in, kind, fused_recompute=self.recompute, fused_precision=self.precision)
        if (rule := self.rule_for(module)) is None:
            return None
        mixin = FusedWholeBlock if rule.inside is None else FusedInside
        options = {"fused_recompute": self.recompute, "fused_precision": self.precision}
        return fused_class(mixin, kind, fused_rule=rule, **options)

    def is_one_ffn(self, sequential: nn.Module) -> bool:
        """Whether an ``nn.Sequential`` is an FFN without a run of linear, activation, linear: a GLU may hide it."""
        runs = [found for _, _, found in find_runs(list(sequential.children()))]
        if any(isinstance(found, FFNPieces) for found in runs):
            return False
        rule = self.rule_for(sequential)
        # There may be a GLU between two linears, which was read; other reasons against a run may disappear later.
        return rule is not None and (not runs or bool(rule.holders))

    def why_class_stays(self, block: nn.Module, fused: type[FusedBlock]) -> str | None:
        """Why the block itself, apart from its children, cannot get the class ``fused``; or None."""
        methods = ["forward", "_ff_block"] if issubclass(fused, FusedTransformerLayer) else ["forward"]
        rule = self.rule_for(block)
        if rule is not None and rule.inside is not None:
            if not callable(getattr(type(block), rule.inside, None)):
                return f"has no method {rule.inside!r}, which the rule names"
            methods.append(rule.inside)
        # With a rule the methods may be patched: it is trusted, or was read from the patched methods.
        believed = rule is not None
        for method in methods:
            if method in vars(block):
                return f"has a {method} of its own, set on the instance"
            if not believed and (patch := patched_method(type(block), method)) is not None:
                return f"has another {method} than its class was written with: {patch}"
        if issubclass(fused, FusedWholeBlock):
            _, *parameters = inspect.signature(type(block).forward).parameters.values()
            required = [parameter.kind for parameter in parameters if parameter.default is parameter.empty]
            if required not in ([inspect.Parameter.POSITIONAL_OR_KEYWORD], [inspect.Parameter.POSITIONAL_ONLY]):
                return "has a forward that does not take exactly one tensor"
        return None

    def why_left(self, module: nn.Module) -> str | None:
        """The reason to report for a module that is left, or None."""
        if isinstance(module, FusedBlock) and module.fused_recompute != self.recompute:
            return f"already fused, with recompute={module.fused_recompute!r}; restore it first to change that"
        if isinstance(module, FusedBlock) and module.fused_precision != self.precision:
            return f"already fused, with precision={module.fused_precision!r}; restore it first to change that"
        if isinstance(module, FusedBlock) and (reason := module.why_fused_class_changed()):
            return f"already fused, but calls its own forward: {reason}"
        if isinstance(module, FusedFFN) and self.precision not in (None, module.precision):
            return f"already fused, with precision={module.precision!r}, an attribute of it"
        if isinstance(module, (FusedBlock, FusedFFN)):
            return "already fused"
        found = self._recognised(module)
        if module in self._refused:
            return self._refused[module]
        return why_unnamed(module, self.taken, found if isinstance(found, str) else None)
