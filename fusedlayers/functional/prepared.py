"""A call that is checked and planned, to be run any number of times."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..planning import Device
from .call import wants_gradient
from .operands import autocast_dtype, compute_dtype
from .recalling import Guard, Recalled, like_call


class Prepared:
    """A checked and planned call, which later calls with such arguments reuse.

    ``ready`` belongs to the kernels: launches that are complete except for addresses. All calls that share it have
    operands of the same shapes, dtypes and layouts. ``observed``: a dispatch mode sees the call; ``repeatable``: other
    calls may reuse it.
    """

    def __init__(
        self,
        operation: Any,
        options: tuple[Any, ...],
        problem: Any,
        plan: Any,
        facts: Device,
        extras: dict[str, Any],
        tensors: Sequence[Any] = (),
        *,
        observed: bool = False,
        repeatable: bool = False,
    ) -> None:
        self.operation, self.options, self.problem, self.plan, self.facts = operation, options, problem, plan, facts
        self.extras, self.observed, self.repeatable = extras, observed, repeatable
        self.wants_gradient = wants_gradient(*tensors)
        self.dtype: torch.dtype | None = None
        if tensors and autocast_dtype(tensors[0].device) is not None:
            self.dtype = compute_dtype(tensors[0])  # what autocast casts operands to
        self.ready: dict[Any, Any] = {}
        self.details = operation.details(plan, extras)
        self.runs_eager: bool = operation.runs_eager(self)
        # torch's expression runs as it is: autocast does not cast, and no error has to name a layout.
        self.direct: bool = self.runs_eager and self.dtype is None and not problem.subclass
        self.wanted: tuple[bool, ...] = ()
        self.kept: tuple[bool, ...] = ()
        self.unread: Sequence[int] = ()
        self.constant: Sequence[int] = ()
        self.layouts: list[Any] = []

    def with_fresh_launches(self) -> Prepared:
        """The same call for operands of other layouts, for which no launch is prepared yet."""
        other = copy.copy(self)
        other.ready = {}
        return other


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
        self._inputs = inputs
        # Mostly the next call is like the one before. Replaced as a whole, for other threads.
        self._last: tuple[Guard, Prepared] | None = None

    def recall(self, tensors: Sequence[Any], options: tuple[Any, ...]) -> Prepared | None:
        """The prepared call for tensors like these and the same options, or None."""
        last = self._last
        # By identity: True == 1, but not both need be valid.
        if last is None or not all(map(is_, options, self._options)):
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
        guard = like_call(tensors, aligned=not call.runs_eager, positions=self._inputs if call.direct else None)
        if guard is not None:
            self.add(tensors[0].shape, guard, call)
            self._last = guard, call

    def clear(self) -> None:
        super().clear()
        self._last = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
