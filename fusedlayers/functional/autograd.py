"""The kernels of any operation under autograd: one Function, and upstream gradients as kernels read them.

Custom operations have formulas of their own: their calls without gradients pass autograd by, and what they run may need
it all the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.launching import ALIGNMENT_MASK
from .call import transformed
from .last_pass import hooks_are_set, may_be_overwritten


def dense(gradient: Tensor | None) -> Tensor | None:
    """An upstream gradient without a layout of its own, as ``torch.gather(sparse_grad=True)`` gives it one."""
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def contiguous(gradient: Tensor | None) -> Tensor | None:
    """An upstream gradient as kernels read it: sparse, expanded, transposed and negated ones take one copy."""
    gradient = dense(gradient)
    if gradient is None:
        return None
    gradient = gradient.resolve_neg()
    if not gradient.is_contiguous():
        return gradient.contiguous()
    if 1 in gradient.shape:
        gradient = gradient.view(-1).view(gradient.shape)  # an axis of one element may have had any stride
    # A part of a larger tensor may start anywhere; what is copied starts aligned.
    return gradient.clone() if gradient.data_ptr() & ALIGNMENT_MASK else gradient


def _layouts(saved: Sequence[Tensor | None]) -> list[Any]:
    """What all of them are and how they lie, as far as kernels mind; in one step, as every backward pass asks."""
    return [
        None if each is None else (each.dtype, each.shape, each.stride(), each.data_ptr() & ALIGNMENT_MASK)
        for each in saved
    ]


def _said(layout: Any) -> str:
    return "nothing" if layout is None else f"{layout[0]} {list(layout[1])}"


def _version(operand: Tensor) -> int:
    return 0 if operand.is_inference() else operand._version


class _Function(torch.autograd.Function):
    """The kernels of any operation under autograd: the operands follow the prepared call."""

    @staticmethod
    def forward(ctx: Any, call: Any, *operands: Any) -> Any:
        ctx.call = call
        wanted = call.wanted
        if not wanted:
            # All follow from what the call was recognised by. The last is what other threads look for.
            wanted = ctx.needs_input_grad[1:]
            call.kept = call.operation.kept(wanted)
            call.unread = [place for place in call.operation.unread(call, wanted) if operands[place] is not None]
            call.constant = call.operation.constant(call.problem, wanted)
            call.wanted = wanted
        results, made = call.operation._forward(call, operands, wanted)
        saved = [operand if keep else None for operand, keep in zip(operands, call.kept, strict=True)]
        if call.unread:
            ctx.unread = [(operands[place], _version(operands[place])) for place in call.unread]
            for place in call.unread:
                saved[place] = None
        ctx.hooked = call.operation.last_backward is not None and hooks_are_set()
        ctx.save_for_backward(*saved, *made)
        ctx.set_materialize_grads(False)
        if call.constant:
            ctx.mark_non_differentiable(*[each for place in call.constant if (each := results[place]) is not None])
        if not call.layouts:
            call.layouts = _layouts((*saved, *made))
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        # Before another tuple holds them, too.
        last = call.operation.last_backward is not None and may_be_overwritten(saved, len(call.kept), ctx.hooked)
        # Hooks of saved tensors may have brought back tensors that lie otherwise, and so may an assignment to .data.
        # What kernels made for themselves they read as they made it.
        if (layouts := _layouts(saved)) != call.layouts:
            for found, kept in zip(layouts, call.layouts, strict=True):
                if found[:2] != kept[:2] if found and kept else found is not kept:
                    raise RuntimeError(
                        f"{call.operation.name} saved {_said(kept)} for its backward pass, and got {_said(found)} "
                        "back: expected the same dtype and shape"
                    )
            call, count = call.apart(), len(call.kept)
            saved = *saved[:count], *[each if each is None else each.contiguous() for each in saved[count:]]
        if call.unread:
            again = torch.is_grad_enabled() or transformed(*upstream)
            saved = list(saved)
            for place, (operand, version) in zip(call.unread, ctx.unread, strict=True):
                if again and _version(operand) != version:
                    name = call.operation.operands.split()[place].rstrip("?")
                    raise RuntimeError(
                        f"{call.operation.name}: {name} {list(operand.shape)} was modified by an inplace operation "
                        "between forward and backward: gradients that are to be differentiated need its value"
                    )
                saved[place] = operand
        return None, *call.operation.gradients(call, saved, ctx.needs_input_grad[1:], upstream, last=last)


# Function.apply itself looks through its arguments for wrappers that an ended transform of torch.func has left behind;
# operands under a transform never come here.
apply: Callable[..., Any] = super(torch.autograd.Function, _Function).apply


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def autograd_in_reach() -> AbstractContextManager[Any]:
    """A context in which autograd differentiates, also within a custom operation, below which it is out of reach."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD)
    return guard


class DirectCalls:
    """Registers an operation's formula for autograd such that calls without gradients ``run`` its kernels at once.

    Compiled graphs make no others. The formula itself asks the dispatcher once more for the kernels, which takes as
    long as it takes to launch them.
    """

    def __init__(self, library: torch.library.Library, run: Callable[..., list[Tensor]]) -> None:
        self.library, self.run = library, run

    def impl(self, name: str, formula: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        """As ``torch.library.Library.impl``."""

        def run(keyset: Any, *given: Any) -> Any:
            if torch.is_grad_enabled() or not _kernels_are_next(keyset.raw_repr()):
                return formula(keyset, *given)
            return self.run(*given)

        self.library.impl(name, run, key, with_keyset=with_keyset)


@cache
def _kernels_are_next(keys: int) -> bool:
    """Whether nothing comes between autograd and the kernels of a device: no mode, no transform, no subclass."""
    later = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset
    for passed in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.BackendSelect):
        later = later.remove(passed)
    return later.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
