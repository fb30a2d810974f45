"""The parts of a block's FFN, kept from call to call while a guard finds them unchanged.

Searching a block for the parts of its FFN takes longer than a small product. So a block keeps what it found, with a
guard on all that the search looked at and that can change: where the parts are, their classes, hooks and methods, the
options of activation and dropout, and the kind of the parameters. Parameters themselves are read at every call, and
nothing here refers to them: a child that is replaced is freed at once.

A loop over these conditions would still take a third of the time of a small layer. So the guard is generated as the
source of a function, once for all blocks that are built alike, as ``dataclasses`` and torch.compile's guards are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.last_call import same_as
from .children import active_adapter, parameter
from .pieces import FFNPieces

KEPT = "_fused_kept"
_MISSING = object()
# Options of activations and of dropout modules that can be set between two calls.
_OPTIONS = ("approximate", "negative_slope", "p", "training")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Guard:
    """Builds the guard of a block: the source of a function, and the values that it compares with.

    In the source, ``module0`` is the block and ``own0`` its ``__dict__``; its parts follow as ``module1``, ``own1`` ...
    """

    def __init__(self) -> None:
        self._lines = ["own0 = module0.__dict__"]
        self._values: list[object] = []

    def value(self, value: object) -> str:
        """Adds a value, and returns its name in the source."""
        self._values.append(value)
        return f"value{len(self._values) - 1}"

    def unless(self, condition: str) -> None:
        """The guard fails unless the condition holds."""
        self._lines.append(f"if not ({condition}): return False")

    def note(self, line: str) -> None:
        self._lines.append(line)

    def function(self) -> Callable[[nn.Module], bool]:
        """The guard: whether all conditions hold for a block."""
        names = ", ".join(f"value{index}" for index in range(len(self._values)))
        body = "\n        ".join((*self._lines, "return True"))
        return _maker(f"def make({names}):\n    def stands(module0):\n        {body}\n    return stands\n")(
            *self._values
        )


@functools.cache
def _maker(source: str) -> Callable[..., Any]:
    """The function ``make`` of this source."""
    space: dict[str, Any] = {}
    exec(compile(source, f"<{__name__}>", "exec"), space)
    return space["make"]


class Kept:
    """What a block found, and the guard on it.

    Args:
        block: the block.
        found: the result to reuse.
        names: attributes of the block that are parts of its FFNs; they may have dots.
        pieces: the FFNs.
        methods: (class or module, name) of further methods and functions to guard; the parts' forwards always are.
        whole: whether the block holds nothing else, so that new children and tensors of its own matter, too.

    ``stands(block)`` is the guard: while it holds, a search would find the same again.
    """

    __slots__ = ("_attributes", "found", "stands")

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
        guard = _Guard()
        guard.unless(f"type(module0) is {guard.value(type(block))}")
        parts = list(dict.fromkeys(path for name in names for path in (*_holders(name), name, *_inside(block, name))))
        others = [name for name in block._modules if whole and name not in parts]
        if whole:
            guard.unless(f"len(own0['_modules']) == {len(block._modules)}")
            guard.unless("not own0['_parameters'] and not own0['_buffers']")
        linears = {id(linear) for each in pieces for linear in each.read_linears()}
        owners: dict[str, tuple[int, Any]] = {"": (0, block)}
        counting = dict.fromkeys(methods)
        tensors: dict[str, Tensor] = {}
        self._attributes: list[object] = []
        for path in (*parts, *others):
            holder, _, name = path.rpartition(".")
            owner, module = owners[holder]
            part = getattr(module, name, _MISSING)
            index = len(owners)
            if not isinstance(part, nn.Module):
                self._attributes.append(part)
                _same_attribute(guard, owner, name, module, part)
                if any(other.startswith(f"{path}.") for other in parts):
                    # An object with options, such as a configuration.
                    owners[path] = index, part
                    guard.note(f"own{index} = (module{index} := {guard.value(part)}).__dict__")
                continue
            owners[path] = index, part
            _same_module(guard, owner, name, index, part)
            if path not in parts:
                continue
            counting[type(part), "forward"] = None
            _same_call(guard, index, part)
            if (adapter := active_adapter(part)) is not None:
                _same_adapter(guard, index, part, adapter)
            if id(part) in linears:
                tensors |= _same_kinds(guard, index, part)
        for kind, name in counting:
            for index, part in owners.values() if name != "forward" and isinstance(kind, type) else ():
                if isinstance(part, kind):
                    guard.unless(f"{name!r} not in own{index}")
            guard.unless(f"{guard.value(kind)}.{name} is {guard.value(getattr(kind, name))}")
        guard.unless(f"{guard.value(same_as(*tensors.values()))}({', '.join(tensors)})")
        self.stands = guard.function()

    def is_complete(self) -> bool:
        """Whether the guard sees every change; it cannot look inside a ``functools.partial``."""
        return not any(isinstance(value, functools.partial) for value in self._attributes)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or unpickled block searches anew."""
        return type(None), ()


def _same_attribute(guard: _Guard, owner: int, name: str, module: nn.Module, value: object) -> None:
    """Guards an attribute that is no module: the same object in the same place."""
    own, expected = f"own{owner}", guard.value(value)
    if name in module.__dict__:
        guard.unless(f"{own}.get({name!r}, {guard.value(_MISSING)}) is {expected}")
    else:
        # A child that is None, or an attribute of the class.
        missing = guard.value(_MISSING)
        guard.unless(f"{name!r} not in {own} and getattr(module{owner}, {name!r}, {missing}) is {expected}")


def _same_module(guard: _Guard, owner: int, name: str, index: int, part: nn.Module) -> None:
    """Guards a child: the same object, of the same class, not hidden by an attribute of the same name."""
    guard.note(f"module{index} = own{owner}['_modules'].get({name!r})")
    guard.unless(
        f"module{index} is not None and module{index} is {guard.value(weakref.ref(part))}() "
        f"and type(module{index}) is {guard.value(type(part))} and {name!r} not in own{owner}"
    )
    guard.note(f"own{index} = module{index}.__dict__")


def _same_call(guard: _Guard, index: int, part: nn.Module) -> None:
    """Guards a call: nothing is attached to it, and the module's options are unchanged."""
    own = f"own{index}"
    guard.unless(f"not ({' or '.join(f'{own}[{hooks!r}]' for hooks in _HOOKS)})")
    guard.unless(f"'forward' not in {own} and {own}.get('_compiled_call_impl') is None")
    for option in _OPTIONS:
        if option in part.__dict__ and (option != "training" or type(part) is nn.Dropout):
            value, missing = guard.value(part.__dict__[option]), guard.value(_MISSING)
            guard.unless(f"{own}.get({option!r}, {missing}) == {value}")


def _same_adapter(guard: _Guard, index: int, linear: Any, name: str) -> None:
    """Guards the adapters of a linear: still the same active ones, none merged, disabled or a variant."""
    active = linear._active_adapter
    guard.unless(
        f"not own{index}['_disable_adapters'] and not own{index}['merged_adapters'] and not own{index}['lora_variant'] "
        f"and own{index}['_active_adapter'] == {guard.value(active if isinstance(active, str) else list(active))} "
        f"and own{index}['scaling'].get({name!r}) == {guard.value(linear.scaling[name])}"
    )


def _same_kinds(guard: _Guard, index: int, linear: nn.Module) -> dict[str, Tensor]:
    """Guards whether there is a bias; returns the tensors to compare, by their names in the source."""
    found = {}
    for each in ("weight", "bias"):
        name = f"{each}{index}"
        tensor = parameter(linear, each)
        registered = f"own{index}['_parameters'].get({each!r})"
        guard.note(f"{name} = {registered if each in linear._parameters else f'module{index}.{each}'}")
        guard.unless(f"{name} is {'' if tensor is None else 'not '}None")
        if tensor is not None:
            found[name] = tensor
    return found


def _holders(path: str) -> list[str]:
    steps = path.split(".")[:-1]
    return [".".join(steps[: count + 1]) for count in range(len(steps))]


def _inside(block: nn.Module, path: str) -> list[str]:
    """Paths of the modules inside a linear with an adapter; none for any other part."""
    part: Any = block
    for name in path.split("."):
        part = getattr(part, name, None)
    if not isinstance(part, nn.Module) or (adapter := active_adapter(part)) is None:
        return []
    inside = [f"{kind}{name}" for kind in ("lora_A", "lora_B", "lora_dropout") for name in ("", f".{adapter}")]
    return [f"{path}.{name}" for name in ("base_layer", *inside)]


def kept(block: nn.Module) -> Any:
    """What :func:`keep` was given for ``block``, or None where something has changed since, or torch.jit traces."""
    found = block.__dict__.get(KEPT)
    # torch.jit would trace the comparison of shapes, and warn.
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
    """Keeps ``found`` in ``block``; the arguments are those of :class:`Kept`."""
    if torch._C._get_tracing_state() is not None:
        return
    made = Kept(block, found, names, pieces, methods, whole=whole)
    if made.is_complete():
        # Bypasses the block's __setattr__, which may be the user's.
        block.__dict__[KEPT] = made


def forget(block: nn.Module) -> None:
    """Removes what :func:`keep` stored in the block."""
    block.__dict__.pop(KEPT, None)
