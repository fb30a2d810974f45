"""The parts of a block's FFN, kept from call to call while a guard finds them unchanged.

Searching a block for the parts of its FFN takes longer than a small product. So a block keeps what it found, with a
guard on what the search looked at and what can change: where the parts are, their classes, hooks and methods, the
options of activation and dropout. Parameters are read at every call, and compared with those of earlier calls when the
call is recalled; nothing here refers to them: a child that is replaced is freed at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from torch import nn

from ..kernels.torch_internals import count_dispatch_modes, has_global_hook, jit_trace
from .children import active_adapter

KEPT = "_fused_kept"
_MISSING = object()
# Options of activations and of dropout modules that can be set between two calls.
_OPTIONS = ("approximate", "negative_slope", "p", "training")


class _Child(NamedTuple):
    """A child that must stay: the same object, of the same class, not hidden by an attribute of the same name."""

    holder: int  # position of the module that holds it: 0 is the block, then the children in order
    name: str
    module: weakref.ref[nn.Module]
    kind: type[nn.Module]
    is_part: bool  # of an FFN; another child is called by the block's own code
    options: tuple[tuple[str, Any], ...]
    adapter: tuple[Any, str, Any] | None  # active adapters, the name of the one that is read, its scale


class _Attribute(NamedTuple):
    """An attribute that is no child and must stay the same object."""

    holder: int  # as of a child; -1: ``owner``
    owner: Any
    name: str
    value: Any


class BlockGuard:
    """What a block found, and what must not have changed for :func:`kept` to return it.

    Args:
        block: the block.
        found: the result to reuse.
        names: attributes of the block that are parts of its FFNs; they may have dots.
        methods: (class or module, name) of further methods and functions to guard; the parts' forwards always are.
        whole: whether the block holds nothing else, so that new children and tensors of its own matter, too.
    """

    __slots__ = ("_attributes", "_children", "_kind", "_methods", "_own_methods", "_whole", "found")

    def __init__(
        self,
        block: nn.Module,
        found: Any,
        names: Iterable[str],
        methods: Iterable[tuple[type[nn.Module], str]] = (),
        *,
        whole: bool = False,
    ) -> None:
        self.found, self._kind = found, type(block)
        self._whole = len(block._modules) if whole else None
        # Whatever holds a part comes before it.
        parts = dict.fromkeys(
            path for name in names for path in (*accumulate(name.split("."), "{}.{}".format), *_inside(block, name))
        )
        others = [name for name in block._modules if whole and name not in parts]
        modules: dict[str, tuple[int, nn.Module]] = {"": (0, block)}
        objects: dict[str, Any] = {}
        children: list[_Child] = []
        attributes: list[_Attribute] = []
        guarded = dict.fromkeys(methods)
        for path in (*parts, *others):
            above, _, name = path.rpartition(".")
            holder, owner = modules[above] if above in modules else (-1, objects[above])
            part = getattr(owner, name, _MISSING)
            if isinstance(part, nn.Module):
                modules[path] = len(children) + 1, part
                children.append(_child(holder, name, part, path in parts))
                if path in parts:
                    guarded[type(part), "forward"] = None
                continue
            objects[path] = part
            attributes.append(_Attribute(holder, None if holder >= 0 else owner, name, part))
        self._children, self._attributes = tuple(children), tuple(attributes)
        self._methods = tuple((kind, name, getattr(kind, name)) for kind, name in guarded)
        self._own_methods = tuple(
            (index, name)
            for kind, name in guarded
            for index, part in modules.values()
            if name != "forward" and isinstance(kind, type) and isinstance(part, kind)
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or unpickled block searches anew."""
        return type(None), ()


def _child(holder: int, name: str, module: nn.Module, is_part: bool) -> _Child:
    own, kind = module.__dict__, type(module)
    options = [(each, own[each]) for each in _OPTIONS if each in own and (each != "training" or kind is nn.Dropout)]
    active = active_adapter(module) if is_part else None
    adapter = None if active is None else _adapter(module, active)
    return _Child(holder, name, weakref.ref(module), kind, is_part, tuple(options), adapter)


def _adapter(linear: Any, name: str) -> tuple[Any, str, Any] | None:
    """What a call of a linear with this adapter depends on; None where adapters are merged, disabled or variants."""
    if linear._disable_adapters or linear.merged_adapters or linear.lora_variant:
        return None
    active = linear._active_adapter
    return active if isinstance(active, str) else list(active), name, linear.scaling.get(name)


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
    """What ``block`` found, if a search would find the same again; None also where its children must be called.

    They must under a hook for all modules, and while torch.jit traces: it would trace the comparison of shapes, and
    warn.
    """
    guard: BlockGuard | None = block.__dict__.get(KEPT)
    if guard is None or type(block) is not guard._kind or jit_trace() is not None or has_global_hook():
        return None
    own, whole = block.__dict__, guard._whole
    if whole is not None and (len(own["_modules"]) != whole or own["_parameters"] or own["_buffers"]):
        return None
    modules: list[Any] = [block]
    try:
        for holder, name, reference, kind, is_part, options, adapter in guard._children:
            own = modules[holder].__dict__
            module = own["_modules"][name]
            if module is None or module is not reference() or type(module) is not kind or name in own:
                return None
            modules.append(module)
            if not is_part:
                continue
            own = module.__dict__
            if (
                own["_forward_pre_hooks"]
                or own["_forward_hooks"]
                or own["_backward_pre_hooks"]
                or own["_backward_hooks"]
                or "forward" in own
                or own.get("_compiled_call_impl") is not None
            ):
                return None
            for name, value in options:
                if own[name] != value:
                    return None
            if adapter is not None and adapter != _adapter(module, adapter[1]):
                return None
    except KeyError:
        return None  # something that was there is gone
    for holder, owner, name, value in guard._attributes:
        if getattr(owner if holder < 0 else modules[holder], name, _MISSING) is not value:
            return None
    for kind, name, method in guard._methods:
        if getattr(kind, name) is not method:
            return None
    for index, name in guard._own_methods:
        if name in modules[index].__dict__:
            return None
    return guard.found


def keep(block: nn.Module, guard: BlockGuard) -> None:
    """Keeps what the guard found in ``block``, unless it is traced, or the guard cannot see every change.

    Weights may be stand-ins in a trace. The guard cannot look inside a ``functools.partial``.
    """
    is_complete = not any(isinstance(each.value, functools.partial) for each in guard._attributes)
    if jit_trace() is None and not count_dispatch_modes() and is_complete:
        # Bypasses the block's __setattr__, which may be the user's.
        block.__dict__[KEPT] = guard


def forget(block: nn.Module) -> None:
    """Removes what :func:`keep` stored in the block."""
    block.__dict__.pop(KEPT, None)
