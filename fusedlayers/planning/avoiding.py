"""Tile configurations by name, and plans without those that gave wrong numbers on the user's own machine."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..kernels import tuning
from ..kernels.tuning.dtypes import GENERIC
from .call import Decision
from .devices import Device

# Of an sm90 configuration: the number of SMs and the order of tiles, which change nothing that is compiled.
_UNNAMED = ("sm90", "programs", "group")
WHY_AVOIDED = "gave wrong numbers here in the self-test"


def configurations(plan: Decision) -> dict[str, tuple[str, ...]]:
    """Field of the plan -> the names of what it may launch: the sm90 configuration first, if there is one.

    A generic configuration is named beside the sm90 one, as it runs where operands lie otherwise than its copies
    need them. What a plan within the plan has is behind the name of that one's field and a space.
    """
    return dict(_found(plan, plan.problem))


def _found(plan: Any, problem: Any, inside: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for field in fields(plan):
        config, place = getattr(plan, field.name), f"{inside}{field.name}"
        if field.name == "problem" or not is_dataclass(config):
            continue
        if isinstance(config, Decision):
            # Kernels of another operation, which are named as its own plans name them.
            yield from ((f"{place} {within}", names) for within, names in _found(config, config.problem))
            continue
        if not type(config).__module__.startswith(tuning.__name__):
            yield from _found(config, problem, f"{place} ")
            continue
        nested = getattr(config, "sm90", None)
        yield place, tuple(_name(problem, place, one) for one in (nested, config) if one is not None)


def _name(problem: Any, field: str, config: Any) -> str:
    kernel = f"{problem.family or problem.operation} {field.removesuffix('_tiles')}"
    gated = ", gated" if getattr(problem, "gated", False) else ""
    numbers = [f"{part.name}={getattr(config, part.name)}" for part in fields(config) if part.name not in _UNNAMED]
    return f"{kernel}{gated}, {problem.format.bits} bits: {type(config).__name__}({', '.join(numbers)})"


def without_avoided(make: Callable[[Device, str], Any], device: Device, backend: str) -> Any:
    """The plan that ``make`` makes for ``device`` and ``backend``, with nothing that the device avoids.

    Without the sm90 kernels where one of these is avoided, and through torch where a generic one is: that one
    could run in place of any sm90 one.
    """
    plan = make(device, backend)
    avoided = _avoided(plan, device)
    if not avoided:
        return plan
    generic = replace(device, backend=GENERIC)
    untrusted = _avoided(make(generic, "triton"), device)
    if untrusted:
        generic = replace(device, why_no_kernels=f"{untrusted[0]} {WHY_AVOIDED}")
    return replace(make(generic, backend), avoided=avoided)


def _avoided(plan: Decision, device: Device) -> tuple[str, ...]:
    return tuple(name for names in configurations(plan).values() for name in names if name in device.avoided)
