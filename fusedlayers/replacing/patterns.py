"""Which class `replace` gives to a module: the built-in patterns, the families, and the rules of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from ..modules import FusedFFN, class_path, patched_method
from .blocks import (
    FusedBlock,
    FusedSequentialFFN,
    FusedTransformerDecoderLayer,
    FusedTransformerEncoderLayer,
    FusedTransformerLayer,
)
from .by_rule import FusedInside, FusedWholeBlock, Recipe, fused_class
from .families import FAMILIES
from .finding import attribute, find_runs
from .rules import FFNRule
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


def _uses_super(function: Callable[..., Any]) -> bool:
    """Whether a method, or what a decorator wraps, refers to its class without a name, as ``super()`` does."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and "__class__" in code.co_freevars


class Patterns:
    """The built-in patterns, the rules of the user, and the families, where no rule of the user speaks of them.

    Raises:
        ValueError: two rules for one class, or a rule for a class that needs none.
    """

    def __init__(self, rules: Sequence[FFNRule], recompute: Literal["auto"] | bool | int) -> None:
        self.rules: dict[type[nn.Module] | str, FFNRule] = {}
        self.recompute = recompute
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
        """The rule for modules of exactly this class."""
        if rule := self._rule_of_the_user(type(module)):
            return rule
        rule = FAMILIES.get(class_path(type(module)))
        # Other releases of a library may give a name to another class.
        return rule if rule is not None and attribute(module, rule.up) is not None else None

    def _rule_of_the_user(self, kind: type[nn.Module]) -> FFNRule | None:
        return self.rules.get(kind) or self.rules.get(class_path(kind))

    def fused_class(self, module: nn.Module) -> type[FusedBlock] | None:
        """The class to give to ``module``, or None."""
        kind = type(module)
        if built_in := _BUILT_IN.get(kind):
            return fused_class(Recipe(built_in, kind, None, self.recompute))
        if (rule := self.rule_for(module)) is None:
            return None
        mixin = FusedWholeBlock if rule.inside is None else FusedInside
        return fused_class(Recipe(mixin, kind, rule, self.recompute))

    def why_class_stays(self, block: nn.Module, fused: type[FusedBlock]) -> str | None:
        """What in the block itself, not in its children, keeps it from getting the class ``fused``; or None."""
        methods = ["forward", "_ff_block"] if issubclass(fused, FusedTransformerLayer) else ["forward"]
        rule = self.rule_for(block)
        if rule is not None and rule.inside is not None:
            if not callable(getattr(type(block), rule.inside, None)):
                return f"has no method {rule.inside!r}, which the rule names"
            methods.append(rule.inside)
            functions = [(rule.inside, getattr(type(block), rule.inside))]
            holders = [(name, type(attribute(block, name)), path) for name, path in rule.holder_paths]
            functions += [(f"{name}.forward", kind.forward) for name, kind, path in holders if class_path(kind) == path]
            for name, function in functions:
                if _uses_super(function):
                    return f"its {name} uses super(), which the stand-in for a module does not have"
        # A rule of the user is believed, whatever the methods are made of.
        believed = self._rule_of_the_user(type(block)) is not None
        for method in methods:
            if method in vars(block):
                return f"has a {method} of its own, set on the instance"
            if not believed and (patch := patched_method(type(block), method)) is not None:
                return f"has another {method} than its class was written with: {patch}"
        if issubclass(fused, FusedWholeBlock):
            _, *parameters = inspect.signature(type(block).forward).parameters.values()
            required = [parameter.kind for parameter in parameters if parameter.default is parameter.empty]
            if required != [inspect.Parameter.POSITIONAL_OR_KEYWORD]:
                return "has a forward that does not take exactly one tensor"
        return None

    def why_left(self, module: nn.Module) -> str | None:
        """Why a module to which no class is given deserves a line in the report, or None."""
        if isinstance(module, FusedBlock) and module.fused_recompute != self.recompute:
            return f"already fused, with recompute={module.fused_recompute!r}; restore it first to change that"
        if isinstance(module, FusedBlock) and (reason := module.why_fused_class_changed()):
            return f"already fused, but calls its own forward: {reason}"
        if isinstance(module, FusedInside) and (reason := module.used_otherwise()):
            return f"already fused, but not in its last calls: {reason}"
        if isinstance(module, (FusedBlock, FusedFFN)):
            return "already fused"
        for base in type(module).__mro__[1:]:
            known = self._rule_of_the_user(base) is not None or class_path(base) in FAMILIES
            sequential = base is nn.Sequential and any(find_runs(list(module.children())))
            if known or sequential or (base in _BUILT_IN and base is not nn.Sequential):
                return f"is a subclass of {base.__name__} and may compute something else; name it in an FFNRule"
        return why_unnamed(module)
