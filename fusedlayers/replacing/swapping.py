"""How a module is replaced: it gets another class, a generated subclass of its own, which overrides some methods."""

from __future__ import annotations

import copyreg
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from torch import nn

from ..modules import class_path, say_once

# What a module does after a method of its own class has been patched.
OWN_FORWARD = "runs the forward of its own class"

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
            watched = [name for name in (*overrides, *kind.fused_watched) if hasattr(original, name)]
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
