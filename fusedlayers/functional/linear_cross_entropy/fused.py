"""The fused path of the loss head: losses straight from the product of input and weight, without gradients."""

import torch
from torch import Tensor

from ...kernels import cross_entropy as kernels
from .chunked import Head


def each(head: Head) -> tuple[Tensor, Tensor | None]:
    """The losses ``[M]``, and the entropies if they are wanted."""
    plan = head.plan
    assert plan.logit_tiles is not None
    losses = head.input.new_empty(head.input.shape[0], dtype=torch.float32)
    entropies = torch.empty_like(losses) if plan.problem.entropy else None
    kernels.losses_of_product(
        head.input, head.linear_weight, head.linear_bias, head.target, head.weight, head.weight_sum, head.arithmetic,
        plan.problem.input_precision, plan.logit_tiles, plan.ranges, loss=losses, entropy=entropies,
    )  # fmt: skip
    return losses, entropies


def reduced(head: Head) -> Tensor:
    """The sum or the mean of the losses."""
    losses, _ = each(head)
    loss = losses.sum()
    return loss / head.counted() if head.plan.problem.reduction == "mean" else loss
