"""What a block found at a call and uses again at the next ones, for as long as nothing about its parts has changed.

Searching a block for the parts of its FFN takes longer than a small product. So a block keeps what it found, beside all
that the search looked at and that can change: where the parts are, their classes, hooks and methods, the options of
activation and dropout, and of what kind the parameters are. Parameters themselves are read anew at every call, and
nothing here refers to them: a child that is replaced is freed at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.last_call import same_as
from .children import parameter
from .pieces import FFNPieces

KEPT = "_fused_kept"
_MISSING = object()
# Options of activations and of dropout modules that can be set between two calls.
_OPTIONS = ("approximate", "negative_slope", "p", "training")


class _Place(NamedTuple):
    """A module that the search came by: the place of its owner among these, its name there, and what it was."""

    owner: int
    name: str
    module: weakref.ref[nn.Module]
    kind: type[nn.Module]
    called: bool  # whether the call of the module, and so its hooks, are what the search looked at
    options: tuple[tuple[str, object], ...]
    parameters: tuple[tuple[str, bool], ...]  # of a linear: name, and whether there is one


class Kept:
    """What a block found, and what else was so when it was found.

    Args:
        block: whose parts they are.
        found: what to use again.
        names: of the parts of the block's FFNs, as attributes of the block; they may have dots.
        pieces: the FFNs.
        methods: (class, name) of methods of the block's that count, too; those of the parts do anyway.
        whole: whether the block holds nothing else, so that new children and tensors of its own matter, too.
    """

    __slots__ = ("_children", "_kind", "_methods", "_places", "_same_parameters", "_values", "found")

    def __init__(
        self,
        block: nn.Module,
        found: Any,
        names: Iterable[str],
        pieces: Sequence[FFNPieces],
        methods: Iterable[tuple[type[nn.Module], str]] = (),
        *,
        whole: bool = False,
    ) -> None:
        self.found = found
        self._kind = type(block)
        self._children = len(block._modules) if whole else None
        linears = {id(linear) for each in pieces for linear in each.linears()}
        owners: list[nn.Module] = [block]
        paths = {"": 0}
        places: list[_Place] = []
        values: list[tuple[int, str, object]] = []
        tensors: list[Tensor] = []
        parts = list(dict.fromkeys(path for name in names for path in (*_holders(name), name)))
        for path in (*parts, *(name for name in block._modules if whole and name not in parts)):
            holder, _, name = path.rpartition(".")
            part = getattr(owners[paths[holder]], name, _MISSING)
            if not isinstance(part, nn.Module):
                values.append((paths[holder], name, part))
                continue
            options = [(option, part.__dict__[option]) for option in _OPTIONS if option in part.__dict__]
            if type(part) is not nn.Dropout:
                options = [(option, value) for option, value in options if option != "training"]
            parameters = []
            if id(part) in linears:
                for each in ("weight", "bias"):
                    tensor = parameter(part, each)
                    parameters.append((each, tensor is not None))
                    tensors += () if tensor is None else (tensor,)
            places.append(
                _Place(
                    paths[holder], name, weakref.ref(part), type(part), path in parts, tuple(options), tuple(parameters)
                )
            )
            paths[path] = len(owners)
            owners.append(part)
        self._places, self._values = tuple(places), tuple(values)
        self._same_parameters = same_as(*tensors)
        counting = dict.fromkeys((*methods, *((place.kind, "forward") for place in places if place.called)))
        self._methods = tuple((kind, name, getattr(kind, name)) for kind, name in counting)

    def stands(self, block: nn.Module) -> bool:
        """Whether all of it is still so: then a search would find the same again."""
        if type(block) is not self._kind:
            return False
        for owner_class, name, method in self._methods:
            if getattr(owner_class, name) is not method:
                return False
        whole = self._children is not None
        if whole and (len(block._modules) != self._children or block._parameters or block._buffers):
            return False
        owners, tensors = [block], []
        for owner, name, reference, kind, called, options, parameters in self._places:
            holder = owners[owner].__dict__
            module = holder["_modules"].get(name)
            if module is None or module is not reference() or type(module) is not kind or name in holder:
                return False
            owners.append(module)
            if not called:
                continue
            own = module.__dict__
            if (
                own["_forward_pre_hooks"]
                or own["_forward_hooks"]
                or own["_backward_pre_hooks"]
                or own["_backward_hooks"]
                or "forward" in own
                or module._compiled_call_impl is not None
            ):
                return False
            for option, value in options:
                if own.get(option, _MISSING) != value:
                    return False
            if parameters:
                kept = own["_parameters"]
                for each, given in parameters:
                    tensor = kept[each] if each in kept else getattr(module, each)
                    if tensor is not None:
                        tensors.append(tensor)
                    if (tensor is not None) is not given:
                        return False
        for owner, name, value in self._values:
            own = owners[owner].__dict__
            if (own[name] if name in own else _elsewhere(owners[owner], name)) is not value:
                return False
        return self._same_parameters(*tensors)

    def is_complete(self) -> bool:
        """Whether nothing can change unseen: the options of a partial function lie inside of it."""
        return not any(isinstance(value, functools.partial) for _, _, value in self._values)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a block, or a block that was stored, searches anew."""
        return type(None), ()


def _holders(path: str) -> list[str]:
    steps = path.split(".")[:-1]
    return [".".join(steps[: count + 1]) for count in range(len(steps))]


def _elsewhere(owner: nn.Module, name: str) -> object:
    """The attribute ``name`` of ``owner``, which is not in its own dictionary."""
    modules = owner.__dict__["_modules"]
    return modules[name] if name in modules else getattr(owner, name, _MISSING)


def kept(block: nn.Module) -> Any:
    """What :func:`keep` was given for ``block``, or None where something has changed since, or torch.jit traces."""
    found = block.__dict__.get(KEPT)
    # torch.jit would write the comparison of shapes down, and warn.
    if torch._C._get_tracing_state() is not None:
        return None
    return found.found if found is not None and found.stands(block) else None


def keep(
    block: nn.Module,
    found: Any,
    names: Iterable[str],
    pieces: Sequence[FFNPieces],
    methods: Iterable[tuple[type[nn.Module], str]] = (),
    *,
    whole: bool = False,
) -> None:
    """Let ``block`` keep what was found, as :class:`Kept` takes it."""
    if torch._C._get_tracing_state() is not None:
        return
    made = Kept(block, found, names, pieces, methods, whole=whole)
    if made.is_complete():
        # Past the __setattr__ of the block, which may be the user's.
        block.__dict__[KEPT] = made


def forget(block: nn.Module) -> None:
    """Leave nothing behind in the block."""
    block.__dict__.pop(KEPT, None)
