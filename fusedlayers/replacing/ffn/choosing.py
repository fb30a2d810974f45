"""Which class `replace` gives to a module: by a rule for its class, or by what its source computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...modules import FFNPieces, FusedFFN, base_linear, class_path, patched_method
from ..loss import FusedLossHead
from ..report import ALREADY_FUSED
from ..rules import KNOWN_RULES, FFNRule
from ..signatures import signature
from ..swapping import fused_class
from ..wish import Wish
from .blocks import FusedBlock, FusedSequentialFFN
from .by_rule import FusedInside, FusedWholeBlock
from .finding import find_runs
from .lookalikes import why_lookalike_left
from .recognising import FFNLeft, checked, recognise


def _are_of_one_class(rule: FFNRule, other: FFNRule) -> bool:
    """Whether two rules are for one class. Two classes are compared themselves: those defined in functions may share a
    path."""
    if isinstance(rule.module_class, type) and isinstance(other.module_class, type):
        return rule.module_class is other.module_class
    return rule.class_path == other.class_path


def _is_of_torch(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("torch.nn.")


def linears_of(found: dict[str, FFNPieces | str]) -> set[nn.Module]:
    """The linears of these FFNs, and those that adapters wrap."""
    pieces = [ffn for ffn in found.values() if isinstance(ffn, FFNPieces)]
    linears = {linear for ffn in pieces for linear in (ffn.up, ffn.gate, ffn.down) if linear is not None}
    return linears | {base_linear(linear) for linear in linears}


class Chooser:
    """The rules of the user and the library, and what the sources of other modules compute.

    Ask about the innermost modules first: the linears of one FFN are not part of another.

    Raises:
        ValueError: two rules for one class, or a rule for a class that needs none.
    """

    def __init__(self, rules: Sequence[FFNRule], recompute: Literal["auto"] | bool | int, wish: Wish) -> None:
        self.rules: dict[type[nn.Module] | str, FFNRule] = {}
        self.recompute, self.wish = recompute, wish
        # The linears of the FFNs found so far, fused or not.
        self.taken: set[nn.Module] = set()
        # What modules of equal signature compute, and what each module computes.
        self._alike: dict[Hashable, FFNRule | str | None] = {}
        self._found: dict[nn.Module, FFNRule | str | None] = {}
        known = {class_path(nn.Sequential), *KNOWN_RULES}
        for rule in rules:
            kind = rule.module_class
            needless = isinstance(kind, type) and issubclass(kind, (FusedBlock, FusedFFN))
            twice = any(_are_of_one_class(rule, other) for other in self.rules.values())
            if needless or rule.class_path in known or twice:
                name = kind if isinstance(kind, str) else kind.__qualname__
                raise ValueError(f"rules: {name} needs no rule, or has one already")
            self.rules[kind] = rule

    def rule_of_user(self, module: nn.Module) -> FFNRule | None:
        """The user's rule for exactly the class of a module."""
        kind = type(module)
        return self.rules.get(kind) or self.rules.get(class_path(kind))

    def rule_for(self, module: nn.Module) -> FFNRule | None:
        """The rule for a module: the user's or ours for exactly its class, or one read from its source."""
        found = self.found(module)
        return found if isinstance(found, FFNRule) else None

    def found(self, module: nn.Module) -> FFNRule | str | None:
        """The rule for a module, or why it is left; None: nothing to report."""
        if module not in self._found:
            self._found[module] = self._find(module)
        return self._found[module]

    def _find(self, module: nn.Module) -> FFNRule | str | None:
        kind, given = type(module), self.rule_of_user(module)
        if (rule := given or KNOWN_RULES.get(class_path(kind))) is not None:
            if rule.trusted and rule.inside is None:
                return rule
            found = self._once(signature(module, set()), lambda: checked(module, rule))
            return f"its FFNRule is refused: {found}" if given and isinstance(found, str) else found
        return self.read(module)

    def read(self, module: nn.Module) -> FFNRule | str | None:
        """What the source of a module says of its linears that are in no FFN so far, as :meth:`found` gives it."""
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            return "torch.jit has compiled it"
        of_torch = _is_of_torch(kind) and kind is not nn.Sequential
        known = isinstance(module, (FusedBlock, FusedFFN, FusedLossHead))
        if of_torch or known or kind.forward is nn.Module.forward or not module._modules:
            return None
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            return "its sizes are not known before its first call"
        return self._once(signature(module, self.taken), lambda: recognise(module, self.taken))

    def _once(self, key: Hashable, find: Callable[[], FFNRule | str | None]) -> FFNRule | str | None:
        if key not in self._alike:
            self._alike[key] = find()
        return self._alike[key]

    def fused_class(self, module: nn.Module, precision: str | None) -> type[FusedBlock] | None:
        """The class to give to ``module``, or None."""
        kind, options = type(module), {"fused_recompute": self.recompute, "fused_precision": precision}
        if kind is nn.Sequential and not self.is_one_ffn(module):
            if options == {name: getattr(FusedSequentialFFN, name) for name in options}:
                return FusedSequentialFFN
            return fused_class(FusedSequentialFFN, kind, **options)
        if (rule := self.rule_for(module)) is None:
            return None
        mixin = FusedWholeBlock if rule.inside is None else FusedInside
        return fused_class(mixin, kind, fused_rule=rule, **options)

    def is_one_ffn(self, sequential: nn.Module) -> bool:
        """Whether an ``nn.Sequential`` is an FFN without a run of linear, activation, linear: a GLU may hold one."""
        runs = [found for _, _, found in find_runs(list(sequential.children()))]
        if any(isinstance(found, FFNPieces) for found in runs):
            return False
        rule = self.rule_for(sequential)
        # The reasons against a run may disappear later.
        return rule is not None and (not runs or bool(rule.holders))

    def why_class_stays(self, block: nn.Module, fused: type[FusedBlock]) -> str | None:
        """Why the block itself, apart from its children, cannot get the class ``fused``; or None."""
        methods, rule, of_torch = ["forward"], self.rule_for(block), _is_of_torch(type(block))
        if rule is not None and rule.inside is not None:
            if not callable(getattr(type(block), rule.inside, None)):
                return f"has no method {rule.inside!r}, which the rule names"
            methods.append(rule.inside)
        for method in methods:
            if method in vars(block):
                return f"has a {method} of its own, set on the instance"
            # Methods of other classes may be patched: what they are now was read, or is trusted.
            if of_torch and (patch := patched_method(type(block), method)) is not None:
                return f"has another {method} than its class was written with: {patch}"
        if issubclass(fused, FusedWholeBlock):
            _, *parameters = inspect.signature(type(block).forward).parameters.values()
            required = [parameter.kind for parameter in parameters if parameter.default is parameter.empty]
            if required not in ([inspect.Parameter.POSITIONAL_OR_KEYWORD], [inspect.Parameter.POSITIONAL_ONLY]):
                return "has a forward that does not take exactly one tensor"
        return None

    def why_left(self, module: nn.Module, owner: nn.Module | None) -> str | None:
        """The reason to report for a module that is left, or None. ``owner`` is the module that holds it, if it is a
        list of modules."""
        if isinstance(module, FusedBlock):
            precision = self.wish.of(module, *linears_of(module.find_ffn_pieces(module)))
            for name, wanted in (("recompute", self.recompute), ("precision", precision)):
                if (value := getattr(module, f"fused_{name}")) != wanted:
                    return f"{ALREADY_FUSED}, with {name}={value!r}; restore it first to change that"
            if reason := module.why_fused_class_changed():
                return f"{ALREADY_FUSED}, but calls its own forward: {reason}"
        if isinstance(module, FusedFFN) and self.wish.of(module, *module.children()) not in (None, module.precision):
            return f"{ALREADY_FUSED}, with precision={module.precision!r}, an attribute of it"
        if isinstance(module, (FusedBlock, FusedFFN)):
            return ALREADY_FUSED
        found = self.found(module)
        reason = found if isinstance(found, str) else None
        if isinstance(found, FFNLeft) or (reason and self.rule_of_user(module)):
            return reason
        # Only for lists with linears like those of an FFN: reading the owner takes time.
        if reason is None and owner is not None and why_lookalike_left(module, self.taken, None):
            found = self.read(owner)
            if isinstance(found, (FFNRule, FFNLeft)):
                # The owner's own entry tells of the FFN.
                return None
            reason = self._why_owner_leaves(owner, found)
        return why_lookalike_left(module, self.taken, reason)

    def _why_owner_leaves(self, owner: nn.Module, read: str | None) -> str | None:
        """Why a module runs no FFN of linears in a list that it holds; ``read`` is what its source says of them."""
        holder = f"{type(owner).__name__}, which holds them,"
        if isinstance(owner, FusedBlock) or self.rule_for(owner) is not None:
            return f"{holder} runs another FFN, and only one is fused"
        return read and f"{holder} is left: {read}"

    def why_another_left(self, module: nn.Module) -> str | None:
        """Why another FFN of a module, one of whose FFNs is fused, is left; None if there is no other."""
        found = self.read(module)
        if isinstance(found, FFNRule):
            return f"{found.up}, {found.down}: only one FFN of a module is fused"
        return found if isinstance(found, FFNLeft) else None
