"""The autograd Function of every operation, and upstream gradients in the layout that kernels read.

Custom operations register their own formulas: calls without gradients bypass autograd (:class:`DirectCalls`), and code
inside an operation may use it (:func:`autograd_in_reach`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.launching import ALIGNMENT_MASK
from ..kernels.torch_internals import kernels_are_next
from .call import transformed
from .last_pass import hooks_are_set, may_be_overwritten


def dense(gradient: Tensor | None) -> Tensor | None:
    """An upstream gradient as a strided tensor; ``torch.gather(sparse_grad=True)`` gives sparse ones."""
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
    # A slice may be misaligned; a copy is aligned.
    return gradient.clone() if gradient.data_ptr() & ALIGNMENT_MASK else gradient


def _layouts(saved: Sequence[Tensor | None]) -> list[Any]:
    """(dtype, shape, strides, misalignment) of each tensor; in one step, as every backward pass compares them."""
    return [
        None if each is None else (each.dtype, each.shape, each.stride(), each.data_ptr() & ALIGNMENT_MASK)
        for each in saved
    ]


def _describe(layout: Any) -> str:
    return "nothing" if layout is None else f"{layout[0]} {list(layout[1])}"


def _version(operand: Tensor) -> int:
    return 0 if operand.is_inference() else operand._version


class _Function(torch.autograd.Function):
    """Any operation under autograd; ``apply`` takes the prepared call and the operands."""

    @staticmethod
    def forward(ctx: Any, call: Any, *operands: Any) -> Any:
        ctx.call = call
        wanted = call.wanted
        if not wanted:
            # All of these follow from the call's key. ``wanted`` is set last, because other threads test it.
            wanted = ctx.needs_input_grad[1:]
            call.kept = call.operation.kept(wanted)
            call.unread = [place for place in call.operation.unread(call, wanted) if operands[place] is not None]
            call.constant = call.operation.constant(call.problem, wanted)
            call.wanted = wanted
        operation = call.operation
        forward = operation.forward if call.dtype is None else operation.forward_without_autocast
        results, made = forward(call, operands, wanted)
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
        # Counts references, so it comes before another tuple holds the saved tensors.
        last = call.operation.last_backward is not None and may_be_overwritten(saved, len(call.kept), ctx.hooked)
        # Saved-tensor hooks or an assignment to .data may have changed layouts. Kernels read what they saved themselves
        # as contiguous tensors.
        if (layouts := _layouts(saved)) != call.layouts:
            for found, kept in zip(layouts, call.layouts, strict=True):
                if found[:2] != kept[:2] if found and kept else found is not kept:
                    raise RuntimeError(
                        f"{call.operation.name} saved {_describe(kept)} for its backward pass, and got "
                        f"{_describe(found)} back: expected the same dtype and shape"
                    )
            call, count = call.with_fresh_launches(), len(call.kept)
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


# Function.apply first unwraps dead functorch wrappers among its arguments; operands under a transform never get here.
apply: Callable[..., Any] = super(torch.autograd.Function, _Function).apply


class DirectCalls:
    """Registers an operation's autograd formula so that calls without gradients ``run`` the kernels directly.

    Compiled graphs make only such calls. The formula would redispatch, which takes as long as launching the kernels.
    """

    def __init__(self, library: torch.library.Library, run: Callable[..., list[Tensor]]) -> None:
        self.library, self.run = library, run

    def impl(self, name: str, formula: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        """As ``torch.library.Library.impl``."""

        def run(keyset: Any, *given: Any) -> Any:
            if torch.is_grad_enabled() or not kernels_are_next(keyset.raw_repr()):
                return formula(keyset, *given)
            return self.run(*given)

        self.library.impl(name, run, key, with_keyset=with_keyset)
