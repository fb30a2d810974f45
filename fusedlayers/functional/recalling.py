"""What was prepared for earlier calls, found again for calls like them.

Checks, a plan and launches take longer than many kernels run, and a call that torch runs should cost the host little
more than torch's own. So a call is looked up by a key of a few values, and a guard tells whether it is like the earlier
one. Tensors are compared by torch.compile's own guards in C++, in a third of the time that reading and hashing their
layouts would take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.fx.proxy import TraceError

from ..kernels.launching import ALIGNMENT_MASK
from ..kernels.torch_internals import any_autocast, count_dispatch_modes, is_capturing, jit_trace, tensor_guard
from . import dispatch
from .call import PLAIN_TENSORS, surroundings
from .operands import autocast_dtype, input_precision
from .precision import Float8
from .prepared import Prepared
from .switches import switches

_Value = TypeVar("_Value")
Guard = Callable[[Sequence[Any]], bool]

# Everything is forgotten when a limit is reached, which costs no more than preparing it again.
KEYS_LIMIT = 4096
# Layouts of one key: most keys have one or two.
LAYOUTS_LIMIT = 16
_PLAIN_OPTIONS = frozenset({str, bool, int, float, Float8, type(None)})


def call_key(operation: str, tensors: Sequence[Any], options: tuple[object, ...]) -> tuple[object, ...] | None:
    """What a prepared call of an operation is looked up by: two shapes and the options.

    None where it cannot be: ``x`` is no plain tensor, or an option is of an unusual type.
    """
    first, types = tensors[0], tuple(map(type, options))
    if type(first) not in PLAIN_TENSORS or first.is_nested or not _PLAIN_OPTIONS.issuperset(types):
        return None
    # The second tensor tells the layers of a block apart, which take the same input. A nested tensor has no shape, and
    # attributes of a Proxy of torch.fx are Proxies.
    second: Any = tensors[1] if len(tensors) > 1 else None
    shape = second.shape if getattr(second, "is_nested", None) is False else None
    # Types too: True == 1 == 1.0, but not all of them need be valid.
    return operation, first.shape, shape, options, types


class Recalled(Generic[_Value]):
    """Values by a key, and by a guard on the tensors that they were prepared for. No tensor is kept alive."""

    def __init__(self) -> None:
        self._values: dict[Hashable, list[tuple[Guard, _Value]]] = {}

    def find(self, key: Hashable, tensors: Sequence[Any]) -> _Value | None:
        """The newest value that was added with this key and a guard that holds for these tensors, or None."""
        for holds, value in self._values.get(key, ()):
            if holds(tensors):
                return value
        return None

    def add(self, key: Hashable, guard: Guard | None, value: _Value) -> None:
        """Adds a value, unless it has no guard."""
        if guard is None:
            return
        if len(self._values) >= KEYS_LIMIT:
            self._values.clear()
        known = self._values.get(key, ())
        # Replaced as a whole, because other threads may be reading the list.
        self._values[key] = [(guard, value), *(known if len(known) < LAYOUTS_LIMIT else ())]

    def clear(self) -> None:
        """Forgets everything."""
        self._values.clear()

    def values(self) -> list[_Value]:
        """All values."""
        return [value for known in list(self._values.values()) for *_, value in known]


class ModuleCalls(Recalled[Prepared]):
    """The prepared calls of one module with the same options, by the shape of x.

    Copies and pickles of a module have none.

    Args:
        inputs: positions of the tensors that are not parameters of the module. Where torch runs the call only these are
            compared: its expression takes any parameters.
    """

    def __init__(self, inputs: Sequence[int]) -> None:
        super().__init__()
        self._options: tuple[Any, ...] = ()
        self._numbers: Sequence[int] = ()  # positions among the options
        self._inputs = inputs
        # Mostly the next call is like the one before. Replaced as a whole, for other threads.
        self._last: tuple[Guard, Prepared] | None = None

    def recall(self, tensors: Sequence[Any], options: tuple[Any, ...]) -> Prepared | None:
        """The prepared call for tensors like these and the same options, or None."""
        last, known = self._last, self._options
        if last is None or options != known:
            return None
        for place in self._numbers:
            # True == 1, but not both need be valid.
            if options[place] is not known[place]:
                return None
        holds, call = last
        if holds(tensors):
            return call
        x = tensors[0]
        # A nested tensor has no shape. Shapes of a Proxy of torch.fx are Proxies, which no key equals.
        if getattr(x, "is_nested", True) is not False:
            return None
        for entry in self._values.get(x.shape, ()):
            holds, call = entry
            if holds(tensors):
                self._last = entry
                return call
        return None

    def note(self, call: Prepared, tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
        """Adds a call if others may reuse it; calls with other options are forgotten."""
        if not call.repeatable:
            return
        if options != self._options:
            self.clear()
        self._options = options
        self._numbers = [place for place, option in enumerate(options) if isinstance(option, (int, float))]
        guard = like_call(tensors, aligned=not call.runs_eager, positions=self._inputs if call.direct else None)
        if guard is not None:
            self.add(tensors[0].shape, guard, call)
            self._last = guard, call

    def clear(self) -> None:
        super().clear()
        self._last = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def like_call(tensors: Sequence[Any], *, aligned: bool, positions: Sequence[int] | None = None) -> Guard | None:
    """:func:`like` that also guards :func:`.call.surroundings` and the facts of the device.

    None for a call that must be checked and planned each time.
    """
    around, same = surroundings(tensors[0]), like(tensors, aligned=aligned, positions=positions)
    if around is None or same is None:
        return None
    grad, dtype, precision, capturing, values = around
    device, on_gpu = tensors[0].device, tensors[0].is_cuda
    facts = dispatch.describe(device)

    # All in one function, as small calls are host-bound.
    def holds(others: Sequence[Any]) -> bool:
        return (
            same(others)
            and is_grad_enabled() is grad
            and switches() == values
            and (autocast_dtype(device) if any_autocast() else None) is dtype
            and (not on_gpu or is_capturing() is capturing)
            and (precision is None or input_precision(device, torch.float32) == precision)
            # A dual tensor looks plain, and not every dispatch mode shows in the keys (those of checkpoints do not).
            and forward_ad._current_level < 0
            and not count_dispatch_modes()
            and jit_trace() is None
            # A device has other facts while some are assumed, and after a self-test.
            and dispatch.describe(device) is facts
        )

    return holds


def like(tensors: Sequence[Any], *, aligned: bool, positions: Sequence[int] | None = None) -> Guard | None:
    """A test whether other tensors match these in class, dtype, device, shape, strides and ``requires_grad``.

    It also compares which of them are None or the same tensor, and the dispatch keys of this thread (autocast,
    transforms, modes); with ``aligned``, the addresses modulo 16 bytes. ``positions``: of the tensors to compare, all
    by default. None: these tensors have no strides, or this torch cannot compare them.
    """
    count = len(tensors)
    firsts: dict[int, int] = {}
    absent: list[int] = []
    twice: list[tuple[int, int]] = []
    for position in range(count) if positions is None else positions:
        tensor = tensors[position]
        if tensor is None:
            absent.append(position)
        elif firsts.setdefault(id(tensor), position) != position:
            # torch's guard takes no tensor twice: this one must be the same as that one again.
            twice.append((position, firsts[id(tensor)]))
    read = pick(list(firsts.values()))
    given = read(tensors)
    have_strides = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in given)
    check = tensor_guard(given) if have_strides else None
    if check is None:
        return None
    if len(given) == 1 and not (absent or twice or aligned):
        [only] = firsts.values()
        return _like_one(check, only)
    offsets = [tensor.data_ptr() & ALIGNMENT_MASK for tensor in given] if aligned else []
    misaligned = any(offsets)

    def same(others: Sequence[Any]) -> bool:
        if len(others) != count:
            return False
        for position in absent:
            if others[position] is not None:
                return False
        for position, first in twice:
            if others[position] is not others[first]:
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


def _like_one(check: Callable[..., bool], position: int) -> Guard:
    """:func:`like` of one tensor: what a module whose call torch runs costs more than torch's own."""

    def same(others: Sequence[Any]) -> bool:
        try:
            other = others[position]
            return not other.is_nested and check(other)
        except (AttributeError, IndexError, TraceError):
            return False

    return same


def pick(positions: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the elements of a tuple at these positions, always as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # itemgetter of one position would return the element itself.
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))
