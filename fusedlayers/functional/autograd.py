"""The kernels of any operation under autograd: one Function, and upstream gradients as kernels read them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.launching import ALIGNMENT_MASK


def contiguous(gradient: Tensor | None) -> Tensor | None:
    """An upstream gradient as kernels read it: expanded, transposed and negated ones take one copy."""
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
            call.constant = call.operation.constant(call.problem, wanted)
            call.wanted = wanted
        results, made = call.operation._forward(call, operands, wanted)
        saved = [operand if keep else None for operand, keep in zip(operands, call.kept, strict=True)]
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
        return None, *call.operation.gradients(call, saved, ctx.needs_input_grad[1:], upstream)


# Function.apply itself looks through its arguments for wrappers that an ended transform of torch.func has left behind;
# operands under a transform never come here.
apply: Callable[..., Any] = super(torch.autograd.Function, _Function).apply
