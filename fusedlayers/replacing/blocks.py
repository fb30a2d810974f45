"""The classes that `replace` gives to modules: the original class, with a forward that fuses what is plain."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..modules import FFNPieces, class_path, say_once, why_not_now
from .finding import attribute, dropout_p, find_by_rule, find_ffn, find_runs
from .rules import FFNRule
from .stand_ins import InsideFFN, computed, stand_in

# What a block does instead of running fused where its class was patched.
OWN_FORWARD = "runs the forward of its own class"

# Its subclasses get gradient checkpointing from its __init_subclass__, around their forward.
_CHECKPOINTED = "transformers.modeling_layers.GradientCheckpointingLayer"


class ReplacedModule(nn.Module):
    """Mixin of every class that `replace` gives to a module. Its names are long: they join those of user classes."""

    fused_from: ClassVar[type[nn.Module]]
    # Makes an empty module of a class that cannot be imported; None: it can.
    fused_new: ClassVar[Callable[..., nn.Module] | None] = None

    def __init_subclass__(cls) -> None:
        """End here: a base class of the user that registers its subclasses must not see this one."""
        if any(class_path(base) == _CHECKPOINTED for base in cls.__mro__):
            super().__init_subclass__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by what the class was made from, where it cannot be imported."""
        reduced = super().__reduce_ex__(max(protocol, 2))
        if self.fused_new is None or not isinstance(reduced, tuple):
            return reduced
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (self.fused_new, reduced[1][1:], *reduced[2:])
        return reduced


def restored_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """The method of a restored module's own class. A fused one outlives `restore` where somebody kept it, bound: hooks
    of accelerate stand between a module and the forward that they found."""
    return cast("Callable[..., Any]", getattr(type(module), name).__get__(module))


class FusedBlock(ReplacedModule):
    """Mixin of the classes of modules that hold FFNs."""

    fused_recompute: ClassVar[Literal["auto"] | bool | int] = "auto"
    # The methods of the original class that this one runs in its own way, as they were when it was made.
    fused_methods: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def why_fused_class_changed(cls) -> str | None:
        """Which method of the original class somebody has changed since, or None: it runs as it is now, not fused."""
        for name, method in cls.fused_methods.items():
            if getattr(cls.fused_from, name) is not method:
                return f"the {name} of {cls.fused_from.__qualname__} was changed after replace"
        return None

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        """Every FFN of ``module``: names of its linears -> what the next call reads, or why it cannot be fused."""
        raise NotImplementedError

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would run the original forward, or None if it would run ``functional.ffn``."""
        if reason := self.why_fused_class_changed():
            return reason
        found = self.find_ffn_pieces(self)
        if any(isinstance(pieces, FFNPieces) for pieces in found.values()):
            return why_not_now(*tensors)
        return "; ".join(f"{linears}: {reason}" for linears, reason in found.items()) or "it holds no FFN any more"

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` where the input of the FFN is x, by name."""
        found = self.find_ffn_pieces(self)
        [pieces] = (pieces for pieces in found.values() if isinstance(pieces, FFNPieces))
        return pieces.arguments(x, recompute=self.fused_recompute)


def _try_fused(block: FusedBlock, found: FFNPieces | str, x: Tensor) -> Tensor | None:
    """The FFN of x, or None where the original forward must run."""
    if isinstance(found, str):
        say_once(block, found)
    elif reason := why_not_now(x):
        say_once(block, reason)
    else:
        return functional.ffn(**found.arguments(x, recompute=block.fused_recompute))
    return None


class FusedSequentialFFN(FusedBlock, nn.Sequential):
    """An ``nn.Sequential`` in which every run of linear, activation, [dropout,] linear is one FFN."""

    fused_from = nn.Sequential
    fused_methods: ClassVar = {"forward": nn.Sequential.forward}

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        names = list(module._modules)
        runs = find_runs(list(cast(nn.Sequential, module)))
        return {f"{names[start]}..{names[stop - 1]}": found for start, stop, found in runs}

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        runs = [run for run in find_runs(list(self)) if isinstance(run[2], FFNPieces)]
        if len(runs) != 1 or runs[0][0] != 0:
            slices = ", ".join(f"[{start}:{stop}]" for start, stop, _ in runs)
            raise ValueError(f"the FFNs of this nn.Sequential are its slices {slices}: explain one with its own input")
        return super().call_arguments(x)

    @functools.wraps(nn.Sequential.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if not isinstance(self, FusedSequentialFFN):
            return restored_method(self, "forward")(*args, **kwargs)
        if reason := self.why_fused_class_changed():
            say_once(self, reason, OWN_FORWARD)
            return super().forward(*args, **kwargs)
        return self.run_with_fused_ffns(*args, **kwargs)

    def run_with_fused_ffns(self, input: Tensor) -> Tensor:
        """All modules, one after the other, and every FFN among them in one piece."""
        modules = list(self)
        runs = {start: (stop, found) for start, stop, found in find_runs(modules)}
        position = 0
        while position < len(modules):
            stop, found = runs.get(position, (position + 1, None))
            y = None if found is None else _try_fused(self, found, input)
            if y is None:
                stop, y = position + 1, modules[position](input)
            position, input = stop, y
        return input


class FusedTransformerLayer(FusedBlock):
    """What both Transformer layers share."""

    fused_output_dropout: ClassVar[str]

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        layer = cast(nn.TransformerEncoderLayer, module)
        # Called as it is, whatever it is: its probability is for the report.
        after = dropout_p("output dropout", getattr(layer, cls.fused_output_dropout), layer.training)
        p = after if isinstance(after, float) else 0.0
        found = find_ffn(layer.linear1, layer.linear2, None, layer.activation, layer.dropout, layer.training, p)
        return {"linear1, linear2": cls.why_fused_class_changed() or found}


class FusedTransformerEncoderLayer(FusedTransformerLayer, nn.TransformerEncoderLayer):
    """An ``nn.TransformerEncoderLayer`` whose feed-forward block is one FFN.

    In evaluation without gradients torch runs the whole layer in an inference kernel of its own where it can, and the
    encoder packs padded batches for it. That stays; ``torch.backends.mha.set_fastpath_enabled`` switches it off.
    """

    fused_from = nn.TransformerEncoderLayer
    fused_methods: ClassVar = {"_ff_block": cast(Any, nn.TransformerEncoderLayer)._ff_block}
    fused_output_dropout = "dropout2"

    def _ff_block(self, x: Tensor) -> Tensor:
        [found] = self.find_ffn_pieces(self).values()
        y = _try_fused(self, found, x)
        return super()._ff_block(x) if y is None else self.dropout2(y)


class FusedTransformerDecoderLayer(FusedTransformerLayer, nn.TransformerDecoderLayer):
    """An ``nn.TransformerDecoderLayer`` whose feed-forward block is one FFN."""

    fused_from = nn.TransformerDecoderLayer
    fused_methods: ClassVar = {"_ff_block": cast(Any, nn.TransformerDecoderLayer)._ff_block}
    fused_output_dropout = "dropout3"

    def _ff_block(self, x: Tensor) -> Tensor:
        [found] = self.find_ffn_pieces(self).values()
        y = _try_fused(self, found, x)
        return super()._ff_block(x) if y is None else self.dropout3(y)


class FusedByRule(FusedBlock):
    """Mixin of the classes made for rules: ``class Fused<Name>(FusedByRule, <Name>)``."""

    fused_rule: ClassVar[FFNRule]

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        rule = cls.fused_rule
        gated = attribute(module, rule.gate) is not None
        linears = (rule.up, rule.gate, rule.down) if rule.gate is not None and gated else (rule.up, rule.down)
        return {", ".join(linears): find_by_rule(module, rule)}


class FusedWholeBlock(FusedByRule):
    """Mixin for blocks whose forward is one FFN and nothing else."""

    def run_as_one_ffn(self, x: Any) -> Tensor | None:
        """The whole block for x, or None where the original forward must run."""
        found = find_by_rule(self, self.fused_rule)
        y = _try_fused(self, found, x)
        if y is None:
            return None
        p = cast(FFNPieces, found).output_dropout_p
        return F.dropout(y, p) if p else y


class FusedInside(FusedByRule):
    """Mixin for blocks with an FFN inside a method, which runs as it is on a stand-in for the block."""

    def run_with_fused_ffn(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the method of the original class returns, with the FFN inside fused where it can be."""
        found = find_by_rule(self, self.fused_rule)
        if isinstance(found, str):
            say_once(self, found)
            return method(self, *args, **kwargs)
        activation = attribute(self, self.fused_rule.activation)
        ffn = InsideFFN(found, activation, functools.partial(_try_fused, self), self._say_otherwise)
        return computed(method(stand_in(self, self.fused_rule, ffn), *args, **kwargs), "as a result")

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
_otherwise: dict[type[nn.Module], str] = {}


# In both the signature stays visible: callers ask for it.
def _forward_as_one_ffn(original: type[nn.Module]) -> Callable[..., Any]:
    method = original.forward
    # Blocks whose forward takes no tensor, or more than one, keep their class.
    _, *names = inspect.signature(method).parameters

    @functools.wraps(method)
    def forward(self: FusedWholeBlock, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FusedWholeBlock):
            return restored_method(self, "forward")(*args, **kwargs)
        if reason := self.why_fused_class_changed():
            say_once(self, reason, OWN_FORWARD)
            return original.forward(self, *args, **kwargs)
        if len(args) + len(kwargs) == 1 and (args or names[0] in kwargs):
            y = self.run_as_one_ffn(args[0] if args else kwargs[names[0]])
            if y is not None:
                return y
        return method(self, *args, **kwargs)

    return forward


def _method_on_stand_in(original: type[nn.Module], name: str) -> Callable[..., Any]:
    method = getattr(original, name)

    @functools.wraps(method)
    def on_stand_in(self: FusedInside, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FusedInside):
            return restored_method(self, name)(*args, **kwargs)
        if reason := self.why_fused_class_changed():
            say_once(self, reason, OWN_FORWARD)
            return getattr(original, name)(self, *args, **kwargs)
        return self.run_with_fused_ffn(method, args, kwargs)

    return on_stand_in


class Recipe(NamedTuple):
    """What a class that `replace` gives is made from: its mixin, the original class, the rule, and ``recompute``."""

    kind: type[FusedBlock]
    original: type[nn.Module]
    rule: FFNRule | None
    recompute: Literal["auto"] | bool | int


_made: dict[Recipe, type[FusedBlock]] = {}


def fused_class(recipe: Recipe) -> type[FusedBlock]:
    """The class that `replace` gives to modules; the same for equal recipes, while the original's methods stay."""
    made = _made.get(recipe)
    if made is None or made.why_fused_class_changed():
        made = _made[recipe] = _fused_class(recipe)
    return made


def _fused_class(recipe: Recipe) -> type[FusedBlock]:
    kind, original, rule, recompute = recipe
    if rule is None and recompute == kind.fused_recompute:
        return kind
    made = staticmethod(functools.partial(_new_fused, recipe))
    names: dict[str, Any] = {"fused_from": original, "fused_recompute": recompute, "fused_new": made}
    names |= {"__module__": __name__, "__doc__": original.__doc__}
    if rule is None:
        return type(kind.__name__, (kind,), names)
    names["fused_rule"] = rule
    method = "forward" if rule.inside is None else rule.inside
    if hasattr(original, method):
        names["fused_methods"] = {method: getattr(original, method)}
        names[method] = _forward_as_one_ffn(original) if rule.inside is None else _method_on_stand_in(original, method)
    return type(f"Fused{original.__name__}", (kind, original), names)


def _new_fused(recipe: Recipe, *arguments: Any) -> nn.Module:
    # A copy is what the module is: fused for the methods that replace saw, whatever they are now.
    fused = _made.get(recipe) or fused_class(recipe)
    return fused.__new__(fused, *arguments)
