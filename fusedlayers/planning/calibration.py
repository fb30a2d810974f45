"""What was measured on the user's own GPU: which problems ran faster in kernels, and what follows for others.

A problem that was measured runs as was fastest. Another one runs as two that were measured, if it lies between them:
all three are of the same operation and flags, each size lies between theirs and is aligned as both of theirs are, and
whatever else was measured within these bounds had the same outcome. Nothing is concluded beyond what was measured.
"""

import math
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from typing import Any, NamedTuple

from .avoiding import configurations
from .call import ALIGNED, Decision
from .devices import Device

# Backends by which a problem may be found to run fastest: kernels wherever they can run, as the figures of the
# architecture say, and torch.
CHOICES = ("triton", "auto", "torch")
# Fields of a problem that are neither its sizes nor its flags. What torch.compile has traced was measured neither
# launched nor replayed, but costs the host something between both; a weight that could be trained has no time.
_NO_FLAGS = ("operation", "captured", "compiled", "trains_weight")

Flags = tuple[tuple[str, Any], ...]
Sizes = tuple[tuple[str, int], ...]
# The operation, the flags, the names of the sizes, and whether it was replayed: entries of one family are compared.
_Family = tuple[str, Flags, tuple[str, ...], bool]


class Features(NamedTuple):
    """A problem as entries know it; ``flags`` are the fields that differ from their defaults, and are no sizes."""

    operation: str
    flags: Flags
    sizes: Sizes


class Entry(NamedTuple):
    """What was measured of one problem, launched one by one or ``replayed`` inside a CUDA graph.

    ``choice`` is the backend that it ran fastest by, ``path`` the plan's. ``speed`` is that of the best of ours over
    the best of torch, ``spread`` how far apart the quartiles of either were, as a share of the median.
    """

    features: Features
    replayed: bool
    choice: str
    path: str
    speed: float
    spread: float


def features(problem: Any) -> Features:
    """The operation, the flags and the sizes of a planning problem; sizes are the integers that have no default."""
    flags, sizes = [], []
    for each in fields(problem):
        value = getattr(problem, each.name)
        if each.default is MISSING and type(value) is int:
            sizes.append((each.name, value))
        elif each.name not in _NO_FLAGS and value != each.default:
            flags.append((each.name, value))
    return Features(problem.operation, tuple(sorted(flags)), tuple(sizes))


class Calibration:
    """All that was measured on one GPU; compared by identity, as one is read for each device."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._found: dict[_Family, list[Entry]] = {}
        for entry in entries:
            self._found.setdefault(_family(entry.features, entry.replayed), []).append(entry)

    def __len__(self) -> int:
        return sum(map(len, self._found.values()))

    def has_wins(self, operation: str, dtype: str) -> bool:
        """Whether kernels won anything of an operation in this dtype."""
        return any(
            name == operation and ("dtype", dtype) in flags and any(entry.choice == "triton" for entry in entries)
            for (name, flags, *_), entries in self._found.items()
        )

    def answer(self, problem: Any) -> Entry | None:
        """What was measured of ``problem``, or follows from what was; None where nothing does."""
        found = features(problem)
        if problem.captured or not getattr(problem, "compiled", False):
            return self._answer(found, problem.captured)
        launched, replayed = self._answer(found, False), self._answer(found, True)
        agree = launched is not None and replayed is not None and _outcome(launched) == _outcome(replayed)
        return launched if agree else None

    def _answer(self, found: Features, replayed: bool) -> Entry | None:
        entries = self._found.get(_family(found, replayed), ())
        if exact := next((entry for entry in entries if entry.features.sizes == found.sizes), None):
            return exact
        lower = [entry for entry in entries if _within(entry, entry.features.sizes, found.sizes)]
        upper = [entry for entry in entries if _within(entry, found.sizes, entry.features.sizes)]
        for low in lower:
            for high in upper:
                bounds = low.features.sizes, high.features.sizes
                if _outcome(low) != _outcome(high) or not _as_aligned(found.sizes, *bounds):
                    continue
                if all(_outcome(entry) == _outcome(low) for entry in entries if _within(entry, *bounds)):
                    return min(low, high, key=lambda entry: entry.speed)
        return None


def as_measured(problem: Any, device: Device) -> Any | None:
    """The plan that ran fastest on ``device`` itself; None where that is not known, or what ran is not to run again."""
    entry = None if device.calibration is None else device.calibration.answer(problem.decisive)
    if entry is None or entry.choice == "auto":
        return None
    if entry.choice == "torch":
        why = f"torch was as fast or faster here, as calibrated: the kernels had {entry.speed:.2f} of its speed"
        return problem.plan(replace(device, left_to_torch=why), "auto")
    made: Decision = problem.plan(device, "triton")
    names = {name for found in configurations(made).values() for name in found}
    if made.path != entry.path or names & device.avoided:
        return None
    return replace(made, reason=f"{made.reason}; {entry.speed:.2f} times as fast as torch here, as calibrated")


def _outcome(entry: Entry) -> tuple[str, str]:
    return entry.choice, entry.path


def _family(found: Features, replayed: bool) -> _Family:
    return found.operation, found.flags, tuple(name for name, _ in found.sizes), replayed


def _within(entry: Entry, low: Sizes, high: Sizes) -> bool:
    """Whether no size of an entry is less than the lower one or more than the higher one."""
    sizes = zip(low, entry.features.sizes, high, strict=True)
    return all(least <= size <= most for (_, least), (_, size), (_, most) in sizes)


def _as_aligned(sizes: Sizes, low: Sizes, high: Sizes) -> bool:
    """Whether each size is a multiple of what both bounds are multiples of, as far as that matters."""
    together = zip(low, sizes, high, strict=True)
    return all(size % math.gcd(least, most, ALIGNED) == 0 for (_, least), (_, size), (_, most) in together)
