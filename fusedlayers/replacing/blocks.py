"""The classes that `replace` gives to modules: the original class, with a forward that fuses its plain children.

Here are those for torch's own classes, and what they share with the classes made for rules.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..modules import (
    FFNPieces,
    class_path,
    is_plain_now,
    keep,
    kept,
    outside_of_traces,
    say_once,
    traceable,
    traced_ffn,
    why_not_now,
)
from . import activations
from .conditions import attribute
from .finding import dropout_p, find_ffn, find_runs, identities, next_children
from .rules import FFNRule

# What a block does when its class has been patched.
OWN_FORWARD = "runs the forward of its own class"

_Sequential = nn.Sequential

# Its __init_subclass__ wraps the forward of each subclass in gradient checkpointing.
_CHECKPOINTED = "transformers.modeling_layers.GradientCheckpointingLayer"


class ReplacedModule(nn.Module):
    """Mixin of every class that `replace` gives to a module. The long names keep clear of those of user classes."""

    fused_from: ClassVar[type[nn.Module]]
    # Makes an empty module of a class that cannot be imported; None if the class can be.
    fused_new: ClassVar[Callable[..., nn.Module] | None] = None
    # The methods of the original class that this one overrides, as they were when it was made.
    fused_methods: ClassVar[dict[str, Callable[..., Any]]] = {}
    # Other methods and functions that were read: (class or module that holds it, name, function).
    fused_functions: ClassVar[tuple[tuple[Any, str, Any], ...]] = ()
    # Other methods of the original class that must not change.
    fused_watched: ClassVar[tuple[str, ...]] = ()
    # Whether the class keeps the original's name: transformers writes it into checkpoints and looks it up in tables.
    fused_keeps_name: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Stop here: a user's base class that registers its subclasses must not see this one."""
        if any(class_path(base) == _CHECKPOINTED for base in cls.__mro__):
            super().__init_subclass__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the recipe of the class where it cannot be imported."""
        reduced = super().__reduce_ex__(max(protocol, 2))
        if self.fused_new is None or not isinstance(reduced, tuple):
            return reduced
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (self.fused_new, reduced[1][1:], *reduced[2:])
        return reduced

    @classmethod
    def why_fused_class_changed(cls) -> str | None:
        """Which method of the original class has changed since, or None. It runs as it is now, not fused."""
        for name, method in cls.fused_methods.items():
            if getattr(cls.fused_from, name) is not method:
                return f"the {name} of {cls.fused_from.__qualname__} was changed after replace"
        for owner, name, function in cls.fused_functions:
            if getattr(owner, name, None) is not function:
                return f"the {name} of {owner.__name__} was changed after replace"
        return None

    @classmethod
    def fused_overrides(cls, original: type[nn.Module], **facts: Any) -> dict[str, Callable[..., Any]]:
        """The methods of a class made from this mixin, for modules of class ``original`` and these class attributes."""
        return {"forward": cls.fused_forward(original)}

    @classmethod
    def fused_forward(cls, original: type[nn.Module]) -> Callable[..., Any]:
        """A forward that calls :meth:`run_fused` as long as the forward of the original class is unchanged."""
        method = original.forward

        # functools.wraps keeps the signature visible to callers that inspect it.
        @functools.wraps(method)
        def forward(self: ReplacedModule, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, cls):
                return restored_method(self, "forward")(*args, **kwargs)
            # Dynamo guards these, so it notices a patch, too.
            if original.forward is not method:
                say_once(self, str(self.why_fused_class_changed()), OWN_FORWARD)
                return original.forward(self, *args, **kwargs)
            return self.run_fused(method, args, kwargs)

        return forward

    def run_fused(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``method``, the forward of the original class, returns."""
        raise NotImplementedError


_Kind = TypeVar("_Kind", bound=ReplacedModule)

# Recipe -> the class, while it is in use.
_made: weakref.WeakValueDictionary[tuple[Any, ...], type[ReplacedModule]] = weakref.WeakValueDictionary()


def fused_class(kind: type[_Kind], original: type[nn.Module], **facts: Any) -> type[_Kind]:
    """The class made of a mixin, an original class and class attributes; cached until a method changes."""
    recipe = (kind, original, *facts.items())
    made = _made.get(recipe)
    if made is None or made.why_fused_class_changed():
        names = facts | {"__doc__": original.__doc__, "__module__": kind.__module__, "fused_from": original}
        names["fused_new"] = staticmethod(functools.partial(_new_fused, recipe))
        # Not part of the recipe: it is pickled, and neither modules nor properties can be.
        read = [fact.conditions.owned() for fact in facts.values() if hasattr(fact, "conditions")]
        names["fused_functions"] = tuple(itertools.chain(*read))
        if hasattr(kind, "fused_from"):
            # The mixin is already a subclass of the original class, with methods of its own.
            made = type(kind.__name__, (kind,), names)
        else:
            overrides = kind.fused_overrides(original, **facts)
            further = facts.get("fused_watched", kind.fused_watched)
            watched = [name for name in (*overrides, *further) if hasattr(original, name)]
            names |= overrides | {"fused_methods": {name: getattr(original, name) for name in watched}}
            if kind.fused_keeps_name:
                names |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
            name = original.__name__ if kind.fused_keeps_name else f"Fused{original.__name__}"
            made = type(name, (kind, original), names)
        _made[recipe] = made
    return cast("type[_Kind]", made)


def _new_fused(recipe: tuple[Any, ...], *arguments: Any) -> nn.Module:
    # A copy is fused like its original, even if the methods have been patched since.
    kind, original, *facts = recipe
    made = _made.get(recipe) or fused_class(kind, original, **dict(facts))
    return made.__new__(made, *arguments)


def restored_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """The method of a restored module's own class. A fused method outlives `restore` where somebody keeps it bound, as
    accelerate's hooks do with the forward that they wrap."""
    return cast("Callable[..., Any]", getattr(type(module), name).__get__(module))


class FusedBlock(ReplacedModule):
    """Mixin of the classes of modules that hold FFNs."""

    fused_recompute: ClassVar[Literal["auto"] | bool | int] = "auto"
    fused_precision: ClassVar[str | None] = None

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        """Every FFN of ``module``: names of its linears -> the parts that the next call reads, or why it is not
        fused."""
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
        """The arguments of ``functional.ffn`` by name, if the input of the FFN is x."""
        found = self.find_ffn_pieces(self)
        [pieces] = (pieces for pieces in found.values() if isinstance(pieces, FFNPieces))
        return pieces.arguments(x, None, self.fused_recompute, self.fused_precision)

    def keep_found(self, found: Any, names: Iterable[str], pieces: Sequence[FFNPieces], *, whole: bool) -> None:
        """Cache ``found`` through ``modules.keep``, until a method of the original class changes, too."""
        if all(each.may_be_kept for each in pieces):
            methods = [(self.fused_from, name) for name in self.fused_methods]
            methods += [(owner, name) for owner, name, _ in self.fused_functions]
            methods += [each for found_ffn in pieces for each in activations.functions_read(found_ffn.original)]
            keep(self, found, names, pieces, methods, whole=whole)


def try_fused(block: FusedBlock, found: FFNPieces | str, x: Tensor) -> Tensor | None:
    """The FFN of x, or None if the original forward must run."""
    if isinstance(found, str):
        say_once(block, found)
    elif not is_plain_now(x) and (reason := why_not_now(x)):
        say_once(block, reason)
    else:
        return found.run_instead(x, block.fused_recompute, block.fused_precision)
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

    @functools.wraps(nn.Sequential.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if not isinstance(self, FusedSequentialFFN):
            return restored_method(self, "forward")(*args, **kwargs)
        runs = self.traceable_runs() if is_dynamo_compiling() else self.find_kept_runs()
        # Dynamo guards what it reads, so it notices a patch, too; forward is never None.
        if runs is None or _Sequential.forward is None:
            return super().forward(*args, **kwargs)
        return self.run_with_fused_ffns(runs, *args, **kwargs)

    def run_with_fused_ffns(self, runs: tuple[tuple[int, Any], ...], input: Tensor) -> Tensor:
        """Run all modules in order, and each FFN among them as one operation."""
        position = free = 0
        for module in self:
            if position >= free:
                stop, found = runs[position]
                y = None
                if found is not None:
                    tracing = is_dynamo_compiling()
                    y = traced_ffn(self, found, input, None, None) if tracing else try_fused(self, found, input)
                input, free = (module(input), position) if y is None else (y, stop)
            # Not enumerate: as a global name it would cost a guard.
            position += 1  # noqa: SIM113
        return input

    def find_kept_runs(self) -> tuple[tuple[int, FFNPieces | str | None], ...] | None:
        """For every position, where the run that starts there stops and its FFN; None if the class has changed."""
        runs: tuple[tuple[int, FFNPieces | str | None], ...] | None = kept(self)
        if runs is not None:
            return runs
        if reason := self.why_fused_class_changed():
            say_once(self, reason, OWN_FORWARD)
            return None
        found = {start: (stop, pieces) for start, stop, pieces in find_runs(list(self))}
        pieces = [each for _, each in found.values() if isinstance(each, FFNPieces)]
        runs = tuple(found.get(position, (position + 1, None)) for position in range(len(self)))
        # Not cached otherwise: a run that is not plain may become so without a change to what the cache watches.
        if len(pieces) == len(found):
            names = list(self._modules)
            parts = [name for start, (stop, _) in found.items() for name in names[start:stop]]
            for (start, _), each in zip(found.items(), pieces, strict=True):
                options = activations.watched_options(each.original)
                parts += [f"{names[start + 1]}.{name}" for name in options]
            self.keep_found(runs, parts, pieces, whole=True)
        return runs

    @outside_of_traces
    def traceable_runs(self) -> tuple[tuple[int, tuple[Any, ...] | None], ...] | None:
        """:meth:`find_kept_runs` for a traced call: with its constants in place of the FFNs' parts."""
        if self.why_fused_class_changed():
            return None
        names = list(self._modules)
        found: dict[int, tuple[int, tuple[Any, ...] | None]] = {}
        for start, stop, pieces in find_runs(list(self)):
            up, activation, *dropout, down = names[start:stop]
            found[start] = stop, traceable(
                self, pieces, up=up, down=down, gate=None, activation=activation,
                dropout=dropout[0] if dropout else None, recompute=self.fused_recompute,
                precision=self.fused_precision,
            )  # fmt: skip
        return tuple(found.get(position, (position + 1, None)) for position in range(len(names)))


class FusedOneFFN(FusedBlock):
    """Mixin of the classes of modules that hold one FFN, described by a rule."""

    fused_rule: ClassVar[FFNRule]
    # Whether the block is the FFN and nothing else.
    fused_whole: ClassVar[bool] = False

    def find_ffn(self) -> FFNPieces | str:
        """The FFN, or why it cannot be fused; cached by the block."""
        [found] = self.find_ffn_pieces(self).values()
        if isinstance(found, FFNPieces):
            rule = self.fused_rule
            options = dict(rule.conditions.options)
            options |= {f"{rule.activation_path}.{name}": None for name in activations.watched_options(found.original)}
            names = (*rule.parts(), rule.output_dropout, "training", *dict(rule.holders), *options)
            if self.fused_whole:
                names += (*identities(self, rule), *next_children(self, rule))
            self.keep_found(found, [name for name in names if name is not None], [found], whole=self.fused_whole)
        return found

    @outside_of_traces
    def traceable_ffn(self) -> tuple[Any, ...] | None:
        """What a traced call treats as constants."""
        rule, [found] = self.fused_rule, self.find_ffn_pieces(self).values()
        return traceable(
            self, self.why_fused_class_changed() or found, up=rule.up, down=rule.down, gate=rule.gate,
            activation=None if attribute(self, rule.activation_path) is None else rule.activation_path,
            dropout=rule.dropout, recompute=self.fused_recompute,
            precision=self.fused_precision,
        )  # fmt: skip


class FusedTransformerLayer(FusedOneFFN):
    """The common part of both Transformer layers."""

    fused_rule = FFNRule(nn.Module, up="linear1", down="linear2", dropout="dropout")
    fused_output_dropout: ClassVar[str]

    @classmethod
    def find_ffn_pieces(cls, module: nn.Module) -> dict[str, FFNPieces | str]:
        layer = cast(nn.TransformerEncoderLayer, module)
        # This module is called as it is; its probability is only for the report.
        after = dropout_p("output dropout", getattr(layer, cls.fused_output_dropout), layer.training)
        p = after if isinstance(after, float) else 0.0
        found = find_ffn(layer.linear1, layer.linear2, None, layer.activation, layer.dropout, layer.training, p)
        return {"linear1, linear2": cls.why_fused_class_changed() or found}

    def run_fused_ffn(self, x: Tensor) -> Tensor | None:
        """The FFN of x, or None if the original forward must run."""
        if is_dynamo_compiling():
            facts = self.traceable_ffn()
            return None if facts is None else traced_ffn(self, facts, x, None, None)
        return try_fused(self, kept(self) or self.find_ffn(), x)


class FusedTransformerEncoderLayer(FusedTransformerLayer, nn.TransformerEncoderLayer):
    """An ``nn.TransformerEncoderLayer`` whose feed-forward block is one FFN.

    In evaluation without gradients, torch runs the whole layer in its own inference kernel where it can, and the
    encoder packs padded batches for it. That stays; ``torch.backends.mha.set_fastpath_enabled`` switches it off.
    """

    fused_from = nn.TransformerEncoderLayer
    fused_methods: ClassVar = {"_ff_block": cast(Any, nn.TransformerEncoderLayer)._ff_block}
    fused_output_dropout = "dropout2"

    def _ff_block(self, x: Tensor) -> Tensor:
        y = self.run_fused_ffn(x)
        return super()._ff_block(x) if y is None else self.dropout2(y)


class FusedTransformerDecoderLayer(FusedTransformerLayer, nn.TransformerDecoderLayer):
    """An ``nn.TransformerDecoderLayer`` whose feed-forward block is one FFN."""

    fused_from = nn.TransformerDecoderLayer
    fused_methods: ClassVar = {"_ff_block": cast(Any, nn.TransformerDecoderLayer)._ff_block}
    fused_output_dropout = "dropout3"

    def _ff_block(self, x: Tensor) -> Tensor:
        y = self.run_fused_ffn(x)
        return super()._ff_block(x) if y is None else self.dropout3(y)
