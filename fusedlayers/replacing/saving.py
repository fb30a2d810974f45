"""For the report: the plan of a training batch, what a block saves for its backward pass, and whether kernels can run
it at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import planning
from ..devices import describe
from ..functional.dispatch import facts_for
from ..functional.operation import Operation
from ..functional.precision import WORD
from ..functional.switches import backend
from ..planning import Device

# A training batch: large enough that the planner does not reject it as too small.
TOKENS = 65_536
# The last fields of an `Entry`: ``saved_bytes`` per token, ``why_no_kernels`` and ``plan``.
Facts = tuple["tuple[int, int] | None", "str | None", "str | None"]


class Planned(NamedTuple):
    """The plan of a training batch, and the device that it is for."""

    plan: Any
    device: Device

    def facts(self, saved_bytes: tuple[int, int] | None) -> Facts:
        """The last fields of the entry of a block that saves these bytes per token."""
        return saved_bytes, self.why_no_kernels(backend()), self.plan.path

    def why_no_kernels(self, wish: str) -> str | None:
        """Why no call runs in a kernel, whatever its size, if this is the backend that is wished for: because of the
        device, or of a dtype that autocast may change."""
        problem = self.plan.problem
        for_the_device = planning.why_never_kernels(replace(problem, dtype="bfloat16"), self.device, wish)
        if for_the_device is not None:
            return for_the_device
        reason = planning.why_never_kernels(problem, self.device, wish)
        return None if reason is None else f"{reason} (unless autocast changes the dtype)"


def of_tokens(width: int, dtype: torch.dtype, *, requires_grad: bool = True) -> Tensor:
    """A tensor of a training batch, without its memory."""
    return torch.empty(TOKENS, width, dtype=dtype, device="meta", requires_grad=requires_grad)


def planned(operation: Operation, on: Device | None, device: torch.device, *inputs: Any, **arguments: Any) -> Planned:
    """The plan of a call, and the device that it is for: ``on``, or this one."""
    tensors, options = operation.bound(*inputs, **arguments)
    plan, facts, instead = _planned(operation, tensors, options, on, device)
    while instead is not None:
        plan, facts, instead = _planned(instead[0], tensors, instead[1], on, device)
    return Planned(plan, facts)


@torch.enable_grad()
def precision_in_words(operation: Operation, on: Device | None, x: Tensor | None = None, **arguments: Any) -> str:
    """Whether a training batch that asks for 8 bits runs in them; of float32 weights, whether it does under autocast.

    The first of the arguments is a weight, ``[out, in]`` unless x is given.
    """
    weight = next(iter(arguments.values()))
    x = of_tokens(weight.shape[1], weight.dtype) if x is None else x
    tensors, options = operation.bound(x=x, **arguments)
    plan, _, instead = _planned(operation, tensors, options, on, weight.device, autocast=True)
    if instead is not None:
        return f"; not in 8 bits: {plan.reason}"
    return f"; {WORD}{' under autocast' if weight.dtype is torch.float32 else ''}"


def _planned(
    operation: Operation,
    tensors: Sequence[Any],
    options: tuple[Any, ...],
    on: Device | None,
    device: torch.device,
    *,
    autocast: bool = False,
) -> tuple[Any, Device, tuple[Operation, tuple[Any, ...]] | None]:
    """(plan, device, the operation with options that runs the call instead); with ``autocast`` float32 is bfloat16."""
    variant = operation.variant(options)
    problem: Any = variant.problem(tensors, options)
    if autocast and problem.dtype == "float32":
        problem = replace(problem, dtype="bfloat16")
    facts = on or _described(problem, device)
    plan = planning.plan(problem, facts, backend())
    return plan, facts, variant.instead(plan, options)


def _described(problem: Any, device: torch.device) -> Device:
    """The device for planning. This tests an unknown release of Triton now, before the model is compiled or
    captured."""
    facts_for(problem, device, backend())
    return describe(device)


def kept_by(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """(tensors that autograd saves in a call, one per storage and without the result's storage; the result)."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage()._cdata, tensor)

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        y = run(x)
    kept.pop(y.untyped_storage()._cdata, None)
    return [*kept.values()], y
