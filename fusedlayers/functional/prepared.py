"""A call that is checked and planned, to be run any number of times."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..planning import Device
from .call import wants_gradient
from .operands import autocast_dtype, compute_dtype


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
