"""The last call of a module, kept so that a repeated call skips checks and planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.fx.proxy import TraceError

from ..kernels.launching import ALIGNMENT_MASK, layout_of
from . import dispatch
from .call import _is_capturing, surroundings
from .operands import autocast_dtype, input_precision
from .switches import switches

# torch.compile's tensor guards, in C++: class, dispatch keys (which include autocast and transforms), dtype, device,
# requires_grad, sizes and strides. The fallback in Python below is several times slower.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

_Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Record(NamedTuple):
    """A call, and how to recognise another one like it."""

    call: Any
    absent: tuple[int, ...]  # positions of the tensors that are None
    compared: _Picker  # picks the tensors for ``same``
    same: Callable[[Sequence[Any]], bool]  # whether these match, under the same modes and switches
    read: _Picker  # picks the tensors for ``aligned``
    aligned: Callable[..., bool] | None
    options: tuple[Any, ...]


class LastCall:
    """Recognises a call that equals the previous one except for addresses.

    It keeps no tensor. Copies and pickles of a module have none.

    Args:
        inputs: positions of the tensors that are not parameters of the calling module: where torch's own expression
            runs, only these are compared. None: no module calls.
        guarded: the module has compared its parameters itself, except for addresses.

    ``by_torch`` is ``(same, options)`` if torch ran the last call of a module with one input, else None: torch also
    runs a call with these options for which ``same((x,))`` holds. That test is cheaper than :meth:`again`.
    """

    __slots__ = ("_guarded", "_inputs", "_record", "_seen", "by_torch")

    def __init__(self, inputs: tuple[int, ...] | None = None, *, guarded: bool = False) -> None:
        self._inputs, self._guarded = inputs, guarded
        self._seen: Any = None
        # Replaced as a whole, so that threads never mix the parts of two calls.
        self._record: _Record | None = None
        self.by_torch: tuple[Callable[[Sequence[Any]], bool], tuple[Any, ...]] | None = None

    def again(self, tensors: Sequence[Any], options: tuple[Any, ...]) -> Any:
        """The prepared call if this one matches it, else None."""
        record = self._record
        if record is None:
            return None
        call, absent, compared, same, read, aligned, known = record
        for place in absent:
            if tensors[place] is not None:
                return None
        # By identity: True == 1, but not both need be valid.
        if options is not known and not all(map(is_, options, known)):
            return None
        if not same(compared(tensors)) or (aligned is not None and not aligned(*read(tensors))):
            return None
        return call

    def note(self, call: Any, tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
        """Notes a call that :meth:`again` did not match; it is kept when it comes twice in a row and is repeatable."""
        if call is self._seen:
            self._keep(call, tensors, options)
        self._seen = call if call.repeatable else None

    def _keep(self, call: Any, tensors: Sequence[Any], options: tuple[Any, ...]) -> None:
        absent = tuple(place for place, tensor in enumerate(tensors) if tensor is None)
        given = [place for place, tensor in enumerate(tensors) if tensor is not None]
        alone = self._inputs is not None and (self._guarded or call.sees_through)
        compared = at_places([place for place in given if not alone or place in (self._inputs or ())])
        same, read = _comes_again(call.facts, compared(tensors)), at_places(given)
        aligned = None if call.sees_through else _aligned_as(*read(tensors))
        self.by_torch = (same, options) if self._inputs == (0,) and call.direct else None
        self._record = _Record(call, absent, compared, same, read, aligned, options)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _comes_again(device: Any, tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """A test whether other tensors match these, under the same modes and switches and the same ``device`` facts.

    All in one function, as small calls are host-bound.
    """
    check = _comparison(*tensors)
    if check is None:
        return lambda others: False
    first = tensors[0]
    place = first.device
    grad, dtype, precision, recording, known = surroundings(first)
    on_gpu = first.is_cuda

    def again(others: Sequence[Any]) -> bool:
        try:
            for other in others:
                # torch's guards read strides first, and abort the process if there are none.
                if other.is_nested:
                    return False
        except (AttributeError, TraceError):
            return False  # not a tensor, or a torch.fx Proxy
        return (
            check(*others)
            and is_grad_enabled() is grad
            and switches() == known
            and (not on_gpu or _is_capturing() is recording)
            and (autocast_dtype(place) if _is_any_autocast_enabled() else None) is dtype
            and (precision is None or input_precision(place, torch.float32) == precision)
            # A dual tensor looks plain, and not every dispatch mode shows in the keys (those of checkpoints do not).
            and forward_ad._current_level < 0
            and not _len_torch_dispatch_stack()
            and _get_tracing_state() is None
            and dispatch._counted is None
            and dispatch.describe(place) is device
        )

    return again


def at_places(places: Sequence[int]) -> _Picker:
    """A function that picks the elements at these positions, always as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    # itemgetter of one position returns the element itself.
    [place] = places
    return lambda values: (values[place],)


def _aligned_as(*tensors: Tensor) -> Callable[..., bool]:
    """A test whether the addresses of other tensors have the alignment of these."""
    expected = [tensor.data_ptr() & ALIGNMENT_MASK for tensor in tensors]
    if any(expected):
        # Rare, so it may be slow.
        return lambda *others: expected == [other.data_ptr() & ALIGNMENT_MASK for other in others]

    def aligned(*others: Tensor) -> bool:
        addresses = 0
        for other in others:
            addresses |= other.data_ptr()
        return not addresses & ALIGNMENT_MASK

    return aligned


def same_as(*tensors: Tensor) -> Callable[..., bool]:
    """A test whether other tensors match these in class, dtype, device, shape and strides, under the same modes."""
    check = _comparison(*tensors)
    if check is None:
        return lambda *others: False

    def same(*others: Any) -> bool:
        try:
            for other in others:
                if other.is_nested:
                    return False
        except AttributeError:
            return False
        return check(*others)

    return same


def alike(tensors: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], bool]:
    """:func:`same_as` that also compares alignment, and takes None where these have None."""
    count, absent = len(tensors), [place for place, tensor in enumerate(tensors) if tensor is None]
    read = at_places([place for place, tensor in enumerate(tensors) if tensor is not None])
    same, aligned = same_as(*read(tensors)), _aligned_as(*read(tensors))

    def again(others: Sequence[Tensor | None]) -> bool:
        if len(others) != count:
            return False
        for place in absent:
            if others[place] is not None:
                return False
        found = read(others)
        return same(*found) and aligned(*found)

    return again


def _comparison(*tensors: Tensor) -> Callable[..., bool] | None:
    """:func:`same_as` for other tensors that have strides; None if one of these has none."""
    if not all(map(_has_strides, tensors)):
        return None
    try:
        check: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*tensors):
            return check
    except Exception:
        # Another release of torch may lack TensorGuards; the comparison in Python does not need them.
        pass
    local, facts = _local_keys(), [_facts(tensor) for tensor in tensors]
    # Thread keys first: they tell a transform, whose tensors have no address.
    return lambda *others: _local_keys() == local and facts == [_facts(other) for other in others]


def _has_strides(tensor: Any) -> bool:
    return getattr(tensor, "layout", None) is torch.strided and not tensor.is_nested


def _facts(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None or not _has_strides(tensor):
        return None
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    return type(tensor), keys, tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, layout_of(tensor)


def _local_keys() -> tuple[int, int]:
    """The dispatch keys that this thread adds and leaves out: autocast, transforms, modes."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()
