"""The fused path of the loss head: losses straight from the product of input and weight.

The backward pass recomputes this product, some columns at a time, and writes their gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import cross_entropy as kernels
from ..operation import Tensors
from ..sums import accumulated, add_product, summed_rows
from .head import Head, padded


def losses(head: Head, saving: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The losses ``[M]``, the entropies and the arg-max if wanted, and with ``saving`` two numbers per token for the
    backward pass."""
    plan = head.plan
    assert plan.logit_tiles is not None
    found = head.input.new_empty(head.input.shape[0], dtype=torch.float32)
    entropies = torch.empty_like(found) if plan.problem.entropy else None
    argmax = torch.empty_like(found, dtype=torch.int64) if plan.problem.argmax else None
    # Computed even if nobody needs them, so that the same kernels run, and round the same way.
    statistics = found.new_empty(2, len(found))
    kernels.losses_of_product(
        head.input, head.linear_weight, head.linear_bias, head.target, head.weight, head.weight_sum, head.arithmetic,
        plan.problem.input_precision, plan.logit_tiles, plan.ranges, loss=found, entropy=entropies,
        statistics=statistics, argmax=argmax,
    )  # fmt: skip
    return found, entropies, argmax, statistics if saving else None


def reduced(head: Head, saving: bool) -> tuple[Tensor, Tensors]:
    """The sum or the mean of the losses; with ``saving`` the tokens' statistics, and for a mean its factor."""
    found, _, _, statistics = losses(head, saving)
    loss = found.sum()
    if head.plan.problem.reduction == "sum":
        return loss, (statistics, None)
    counted = head.counted()
    # Infinite where no token counts, but the kernel of the gradients skips such tokens.
    return loss / counted, (statistics, counted.reciprocal() if saving else None)


def gradients(
    head: Head,
    wanted: Sequence[bool],
    statistics: Tensor,
    upstream: Tensor,
    entropies: Tensor | None = None,
    entropy_upstream: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients of input, linear_weight and linear_bias, for contiguous upstream gradients ``[M]`` of losses
    and entropies."""
    plan, input, dtype = head.plan, head.input, head.input.dtype
    assert plan.gradient_tiles is not None
    tokens, classes = len(input), head.classes
    factors = kernels.row_factors(
        head.target, head.weight, head.weight_sum, classes, head.arithmetic, statistics, upstream, entropies,
        entropy_upstream,
    )  # fmt: skip
    sums_dtype = accumulated(dtype)
    dx = input.new_empty(input.shape, dtype=sums_dtype) if wanted[0] else None
    dw = input.new_empty(head.linear_weight.shape) if wanted[1] else None
    db = input.new_empty(classes) if wanted[3] else None
    for first in range(0, classes, plan.columns):
        columns = slice(first, min(first + plan.columns, classes))
        weight, count = head.linear_weight[columns], columns.stop - first
        # The last columns are padded, as products of unaligned size are slow.
        width = plan.problem.aligned(count)
        gradient = input.new_empty(tokens, width)
        kernels.gradient_of_product(
            input, weight, None if head.linear_bias is None else head.linear_bias[columns], head.target,
            None if head.weight is None else head.weight[columns], statistics[0], factors, first, head.arithmetic,
            plan.problem.input_precision, plan.gradient_tiles, out=gradient,
        )  # fmt: skip
        if dx is not None:
            add_product(dx, gradient.T, weight if width == count else padded(weight, width), first=not first)
        if dw is not None and width == count and not plan.wide_sum:
            torch.mm(gradient.T, input, out=dw[columns])
        elif dw is not None:
            dw[columns] = _product(gradient, input, sums_dtype if plan.wide_sum else dtype)[:count]
        if db is not None:
            db[columns] = summed_rows(gradient)[:count]
        # Free it before the next columns allocate theirs, and before dx is rounded.
        del gradient
    return None if dx is None else dx.to(dtype), dw, db


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``leftᵀ @ right`` in ``dtype``."""
    product = left.new_empty((left.shape[1], right.shape[1]), dtype=dtype)
    add_product(product, left, right, first=True)
    return product
