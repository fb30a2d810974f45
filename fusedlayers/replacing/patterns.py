"""Which class `replace` gives to a module: by a built-in pattern, a rule of the user, or what the module computes."""

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
    """Whether two rules speak of one class, by itself or by its path; inside of functions classes may share a path."""
    if isinstance(rule.module_class, type) and isinstance(other.module_class, type):
        return rule.module_class is other.module_class
    return rule.class_path == other.class_path


class Patterns:
    """The built-in patterns, the rules of the user, and what other modules are found to compute.

    Modules are asked for from the innermost ones on: the linears of an FFN are no part of another one.

    Raises:
        ValueError: two rules for one class, or a rule for a class that needs none.
    """

    def __init__(self, rules: Sequence[FFNRule], recompute: Literal["auto"] | bool | int) -> None:
        self.rules: dict[type[nn.Module] | str, FFNRule] = {}
        self.recompute = recompute
        # The linears of the FFNs that were found so far, fused or not.
        self.taken: set[nn.Module] = set()
        # What modules alike were found to compute, and what each of them was.
        self._alike: dict[Hashable, FFNRule | str | None] = {}
        self._found: dict[nn.Module, FFNRule | str | None] = {}
        # Modules whose rules say something else than their source -> what that says.
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
        """The rule for a module: the user's or ours for exactly its class, or what it was found to compute."""
        if rule := KNOWN_RULES.get(class_path(type(module))):
            return rule
        found = self._recognised(module)
        return found if isinstance(found, FFNRule) else None

    def trusts(self, module: nn.Module) -> bool:
        """Whether a rule of the user's is believed of a module without a look at its source."""
        rule = self._rule_of_the_user(type(module))
        return rule is not None and rule.trusted

    def _recognised(self, module: nn.Module) -> FFNRule | str | None:
        """What a module was found to compute, or why it was left; None: there is nothing to say."""
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
            if self.recompute == built_in.fused_recompute:
                return built_in
            return fused_class(built_in, kind, fused_recompute=self.recompute)
        if (rule := self.rule_for(module)) is None:
            return None
        mixin = FusedWholeBlock if rule.inside is None else FusedInside
        return fused_class(mixin, kind, fused_rule=rule, fused_recompute=self.recompute)

    def is_one_ffn(self, sequential: nn.Module) -> bool:
        """Whether an ``nn.Sequential`` is an FFN although no linear, activation, linear is in a row: GLUs hide them."""
        runs = [found for _, _, found in find_runs(list(sequential.children()))]
        if any(isinstance(found, FFNPieces) for found in runs):
            return False
        rule = self.rule_for(sequential)
        # Between two linears may be a GLU, too, which was read; what else keeps a run from being fused may go.
        return rule is not None and (not runs or bool(rule.holders))

    def why_class_stays(self, block: nn.Module, fused: type[FusedBlock]) -> str | None:
        """What in the block itself, not in its children, keeps it from getting the class ``fused``; or None."""
        methods = ["forward", "_ff_block"] if issubclass(fused, FusedTransformerLayer) else ["forward"]
        rule = self.rule_for(block)
        if rule is not None and rule.inside is not None:
            if not callable(getattr(type(block), rule.inside, None)):
                return f"has no method {rule.inside!r}, which the rule names"
            methods.append(rule.inside)
        # A rule is believed, whatever the methods are made of: the user's, or what the methods were found to compute.
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
        """Why a module to which no class is given deserves a line in the report, or None."""
        if isinstance(module, FusedBlock) and module.fused_recompute != self.recompute:
            return f"already fused, with recompute={module.fused_recompute!r}; restore it first to change that"
        if isinstance(module, FusedBlock) and (reason := module.why_fused_class_changed()):
            return f"already fused, but calls its own forward: {reason}"
        if isinstance(module, (FusedBlock, FusedFFN)):
            return "already fused"
        found = self._recognised(module)
        if module in self._refused:
            return self._refused[module]
        return why_unnamed(module, self.taken, found if isinstance(found, str) else None)
