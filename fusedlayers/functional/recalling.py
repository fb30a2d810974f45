"""What was prepared for earlier calls, found again for calls like them.

Checks, a plan and launches take longer than many kernels run. They follow from a few plain values and from the layouts
of the tensors. A call is looked up by the plain values, its key; its tensors are compared by torch.compile's own
guards in C++, in a third of the time that reading and hashing their layouts would take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx.proxy import TraceError

from ..kernels.launching import ALIGNMENT_MASK
from ..kernels.torch_internals import tensor_guard
from ..planning import Device
from . import dispatch

_Value = TypeVar("_Value")
Comparison = Callable[[tuple[Any, ...]], bool]

# Everything is forgotten when a limit is reached, which costs no more than preparing it again.
KEYS_LIMIT = 4096
# Layouts of one key: most keys have one or two.
LAYOUTS_LIMIT = 16


class Recalled(Generic[_Value]):
    """Values by a key, by the layouts of the tensors that they were prepared for, and by the facts of their device.

    No tensor is kept alive.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, list[tuple[Comparison, torch.device, Device, _Value]]] = {}

    def find(self, key: Hashable, tensors: tuple[Any, ...]) -> _Value | None:
        """The newest value that was added for this key and for tensors like these, or None."""
        for same, device, facts, value in self._values.get(key, ()):
            # A device has other facts while some are assumed, and after a self-test.
            if same(tensors) and dispatch.describe(device) is facts:
                return value
        return None

    def add(self, key: Hashable, tensors: tuple[Any, ...], value: _Value, *, aligned: bool = True) -> None:
        """Adds a value for tensors like these; ``aligned``: also of the same alignment."""
        same = like(tensors, aligned=aligned)
        if same is None:
            return
        device = next(tensor.device for tensor in tensors if tensor is not None)
        if len(self._values) >= KEYS_LIMIT:
            self._values.clear()
        known = self._values.get(key, ())
        entry = same, device, dispatch.describe(device), value
        # Replaced as a whole, because other threads may be reading the list.
        self._values[key] = [entry, *(known if len(known) < LAYOUTS_LIMIT else ())]

    def clear(self) -> None:
        """Forgets everything."""
        self._values.clear()

    def values(self) -> list[_Value]:
        """All values."""
        return [value for known in list(self._values.values()) for *_, value in known]


def like(tensors: tuple[Any, ...], *, aligned: bool) -> Comparison | None:
    """A test whether other tensors match these in class, dtype, device, shape, strides and ``requires_grad``.

    It also compares which of them are None or the same tensor, and the dispatch keys of this thread (autocast,
    transforms, modes); with ``aligned``, the addresses modulo 16 bytes. None: these tensors have no strides, or this
    torch cannot compare them.
    """
    count, absent = len(tensors), [place for place, tensor in enumerate(tensors) if tensor is None]
    firsts: dict[int, int] = {}
    twice: list[tuple[int, int]] = []
    for place, tensor in enumerate(tensors):
        if tensor is not None and firsts.setdefault(id(tensor), place) != place:
            # torch's guard takes no tensor twice: this one must be the same as that one again.
            twice.append((place, firsts[id(tensor)]))
    read = pick(list(firsts.values()))
    given = read(tensors)
    check = tensor_guard(given) if all(map(_has_strides, given)) else None
    if check is None:
        return None
    offsets = [tensor.data_ptr() & ALIGNMENT_MASK for tensor in given] if aligned else []
    misaligned = any(offsets)

    def same(others: tuple[Any, ...]) -> bool:
        if len(others) != count:
            return False
        for place in absent:
            if others[place] is not None:
                return False
        for place, first in twice:
            if others[place] is not others[first]:
                return False
        found = read(others)
        try:
            for other in found:
                # torch's guard reads strides first, and aborts the process if there are none.
                if other.is_nested:
                    return False
        except (AttributeError, TraceError):
            return False  # not a tensor, or a torch.fx Proxy
        if not check(*found):
            return False
        if not aligned:
            return True
        addresses = 0
        for other in found:
            addresses |= other.data_ptr()
        if addresses & ALIGNMENT_MASK:
            return misaligned and offsets == [other.data_ptr() & ALIGNMENT_MASK for other in found]
        return not misaligned

    return same


def pick(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that returns the elements of a tuple at these positions, always as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # itemgetter of one position would return the element itself.
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
