"""Losses of a vocabulary that is sharded over several processes, each with its own rows of the weight.

Every process p computes the logits z of its own classes c, chunk by chunk, and of each token

    top_p = max_c z_c,  total_p = Σ_c exp(z_c - top_p),  and if its target is local  top_p + log total_p - z_target

These are gathered once, and are all that the loss needs:

    top = max_p top_p,  total = Σ_p total_p exp(top_p - top),  loss = top + log total - z_target

The backward pass recomputes the logits, and gives the share of the input's gradient that comes from the local classes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...kernels import cross_entropy as kernels
from ...kernels.cross_entropy import LossArithmetic
from ...planning.linear_cross_entropy import LossPlan
from .. import dispatch
from ..autograd import contiguous
from ..operands import autocast, compute_dtype, without_autocast
from .arguments import loss_problem
from .chunked import Sums, for_each_chunk
from .head import Head

# A local target is one of the process's own classes, from 0 on; or V, their number, for a class of another process; or
# one of these, for a token that does not count, and for a target that is no class of any process.
_IGNORED, _UNKNOWN = -1, -2


class Part(NamedTuple):
    """The classes of a process: the first one, the number over all processes, and the options of the loss.

    ``gather`` stacks the tensors of all processes: ``[...] -> [processes, ...]``.
    """

    first: int
    classes: int
    gather: Callable[[Tensor], Tensor]
    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0

    def arithmetic(self, accuracy: str, z_loss: float = 0.0) -> LossArithmetic:
        """The arithmetic of the local kernels."""
        return LossArithmetic(_IGNORED, accuracy, 0.0, z_loss, self.logit_scale, self.softcap)

    def targets(self, target: Tensor, own: int) -> Tensor:
        """The local targets of this process, which has ``own`` classes."""
        local = target - self.first
        local = torch.where((local >= 0) & (local < own), local, own)
        local = torch.where((target >= 0) & (target < self.classes), local, _UNKNOWN)
        return torch.where(target == self.ignore_index, _IGNORED, local)


def losses_of_part(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, part: Part
) -> Tensor:
    """The losses ``[M]`` of input ``[M, K]``, in at least 32 bits; the same in all processes.

    linear_weight ``[V, K]`` and linear_bias ``[V]`` are those of the local classes. A target that is no class of any
    process makes the loss NaN. The gradient of the input is this process's share of a sum over all.
    """
    dtype = compute_dtype(input)
    input, linear_weight, linear_bias = autocast((input, linear_weight, linear_bias), dtype)
    facts: dict[str, Any] = {"capped": part.softcap is not None, "squared": part.z_loss > 0}
    problem = loss_problem(input, linear_weight, target, linear_bias, parted=True, **facts)
    # One more, for the classes of other processes.
    problem = replace(problem, V=problem.V + 1)
    plan = dispatch.dispatch(problem, input.device)
    dispatch.count(plan)
    with without_autocast(input.device):
        losses: Tensor = _LossesOfPart.apply(input, linear_weight, linear_bias, target, part, plan)
    return losses


class _LossesOfPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, plan: LossPlan
    ) -> Tensor:
        head = _head(input, weight, bias, target, part, plan, 0.0)
        dtype = torch.promote_types(input.dtype, torch.float32)
        # For every token: top, total and loss of the local classes, and whether the target is one of them.
        local = torch.empty(4, input.shape[0], dtype=dtype, device=input.device)
        is_local = (head.target >= 0) & (head.target < weight.shape[0])
        local[3] = is_local

        def visit(rows: slice, logits: Tensor) -> None:
            _fill_statistics(local[:3, rows], head, rows, logits, is_local[rows])

        for_each_chunk(head, visit)
        tops, totals, losses, has_target = part.gather(local).unbind(1)
        top = tops.amax(0)
        total = (totals * (tops - top).exp()).sum(0)
        # From the loss of the process that has the target, which is exact for a token that is almost certain.
        whole = losses + ((top - tops) + (total.log() - totals.log()))
        loss = torch.where(has_target > 0, whole, 0.0).sum(0)
        if part.z_loss:
            loss = loss + part.z_loss * (top + total.log()).square()
        loss = loss.masked_fill(head.target == _UNKNOWN, torch.nan).masked_fill(head.target == _IGNORED, 0.0)
        ctx.save_for_backward(input, weight, bias, target, torch.stack([top, total]))
        ctx.part, ctx.plan = part, plan
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, statistics = ctx.saved_tensors
        head = _head(input, weight, bias, target, ctx.part, ctx.plan, ctx.part.z_loss)
        needs = ctx.needs_input_grad
        sums = Sums(head, (needs[0], needs[1], False, needs[2]))
        gradient = contiguous(upstream)
        assert gradient is not None

        def visit(rows: slice, logits: Tensor) -> None:
            _gradient(head, rows, logits, statistics[:, rows], gradient[rows])
            sums.add(rows, logits)

        with without_autocast(input.device):
            for_each_chunk(head, visit)
        return *sums.gradients(), None, None, None


def _head(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, plan: LossPlan, z_loss: float
) -> Head:
    """The local head; all tokens are one chunk where torch computes."""
    plan = plan if plan.path == "chunked" else replace(plan, rows=max(input.shape[0], 1))
    local = part.targets(target, weight.shape[0])
    return Head(input, weight, bias, local, None, None, plan, part.arithmetic(plan.accuracy, z_loss))


def _fill_statistics(statistics: Tensor, head: Head, rows: slice, logits: Tensor, is_local: Tensor) -> None:
    """Fills ``statistics`` ``[3, m]`` with top, total and loss of a chunk's tokens."""
    target = head.target[rows]
    if head.plan.path == "chunked":
        # A class of another process is no target for the kernel.
        target = torch.where(is_local, target, _IGNORED)
        kernels.losses(logits, target, *head.of_rows(rows)[1:], loss=statistics[2], statistics=statistics[:2])
        return
    scores = reference.logits(logits, head.arithmetic.softcap, head.arithmetic.logit_scale)
    top = scores.amax(-1)
    total = (scores - top.unsqueeze(-1)).exp().sum(-1)
    chosen = scores.gather(-1, torch.where(is_local, target, 0).unsqueeze(-1)).squeeze(-1)
    statistics[0], statistics[1] = top, total
    statistics[2] = torch.where(is_local, top - chosen + total.log(), 0.0)


def _gradient(head: Head, rows: slice, logits: Tensor, statistics: Tensor, upstream: Tensor) -> None:
    """Overwrites the logits of a chunk's tokens with the gradient of their losses."""
    if head.plan.path == "chunked":
        # A class of another process is the column after the last one, which is padding.
        wider = logits.as_strided((logits.shape[0], logits.shape[1] + 1), logits.stride())
        kernels.gradient(wider, *head.of_rows(rows), statistics=statistics, upstream=upstream)
        return
    arithmetic, target, own = head.arithmetic, head.target[rows], logits.shape[1]
    scores = reference.logits(logits, arithmetic.softcap, arithmetic.logit_scale)
    top, total = statistics
    counted = torch.where(target == _IGNORED, 0.0, upstream).masked_fill(target == _UNKNOWN, torch.nan)
    # Softmax, scaled for the squared logsumexp, minus 1 at the target; then the slopes of softcap and scale.
    factor = counted * (1 + 2 * arithmetic.z_loss * (top + total.log())) / total
    gradient = (scores - top.unsqueeze(-1)).exp() * factor.unsqueeze(-1)
    is_local = ((target >= 0) & (target < own)).unsqueeze(-1)
    column = torch.where(is_local, target.unsqueeze(-1), 0)
    gradient.scatter_add_(-1, column, torch.where(is_local, -counted.unsqueeze(-1), 0.0))
    if arithmetic.softcap is not None:
        gradient *= 1 - (scores / arithmetic.softcap).square()
    logits.copy_(gradient * arithmetic.logit_scale)
