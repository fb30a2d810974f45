"""Weight and bias gradient of a linear layer: the public function and the autograd Function of its fused path."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import weight_gradient as kernels
from ..planning import WeightGradientPlan, WeightGradientProblem
from .arguments import check_weight_gradient
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    planned,
    ran_as_kernels,
    recalled,
    rows,
    weight_gradient_problem,
    without_autocast,
)
from .signatures import signature
from .tracing import traced


def weight_gradient(dy: Tensor, x: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """Weight and bias gradient of ``y = x Wᵀ + b``: ``dW = dyᵀ x`` and ``db = Σ dy`` in one pass over dy.

    Args:
        dy: ``[*B, M, O]`` or ``[O]``: any leading dims, any strides; the gradients are sums over all of these rows.
        x: ``[*B, M, K]`` or ``[K]``, with the leading dims of dy.
        bias: whether db is wanted.

    Returns:
        dW ``[O, K]``, and db ``[O]`` or None, in the dtype of dy (under autocast: in autocast's dtype), summed in
        float32 and rounded once. float16, bfloat16 and float32 can run in Triton kernels; every floating dtype runs
        through torch. Both can be differentiated by dy and x.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of dy.
        ValueError: leading dims that differ, tensors without a dimension or on different devices.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        results = COMPOSITE(dy, x, bias)
        return results[0], results[1] if bias else None
    call = signature("weight_gradient", (dy, x), bias)
    known = None if call is None else recalled(call, dy.device)
    if known is None:
        check_weight_gradient(dy, x, bias)
        known = planned(call, weight_gradient_problem(dy, x, bias=bias), dy.device)
    problem, plan = known
    operands = autocast((dy, x), compute_dtype(dy))
    if plan.path == "torch":
        with without_autocast(dy.device):
            return reference.weight_gradient(*operands, bias=bias)
    dy_rows, x_rows = (rows(tensor) for tensor in operands)
    if call is None and traced():
        return KERNELS((dy_rows, x_rows), problem, plan)
    if not problem.training and call is not None:
        found = planned_weight_gradient(dy_rows, x_rows, plan)
    else:
        found = WeightGradientFunction.apply(dy_rows, x_rows, plan)
    ran_as_kernels(problem, dy.device)
    return found


def planned_weight_gradient(dy: Tensor, x: Tensor, plan: WeightGradientPlan) -> tuple[Tensor, Tensor | None]:
    """dW and db, or None, of dy ``[M, O]`` and x ``[M, K]``, as ``plan`` says."""
    problem = plan.problem
    if plan.tiles is None:
        return reference.weight_gradient(dy, x, bias=problem.bias)
    return kernels.weight_gradient(dy, x, problem.bias, plan.splits, problem.input_precision, plan.tiles, plan.pipeline)


class WeightGradientFunction(torch.autograd.Function):
    """dW and db (or None) of dy ``[M, O]`` and x ``[M, K]``; its gradients are plain products, through torch."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, plan: WeightGradientPlan) -> tuple[Tensor, Tensor | None]:
        # dy is needed for the gradient of x and the other way round.
        wants_dy, wants_x = ctx.needs_input_grad[:2]
        ctx.save_for_backward(dy if wants_x else None, x if wants_dy else None)
        ctx.set_materialize_grads(False)
        return planned_weight_gradient(dy, x, plan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, bias_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, x = ctx.saved_tensors
        d_dy = d_x = None
        first = gradient if gradient is not None else bias_gradient
        if first is None:
            return None, None, None
        with without_autocast(first.device):
            if x is not None:
                if gradient is None:
                    d_dy = first.expand(x.shape[0], -1)
                elif bias_gradient is None:
                    d_dy = x @ gradient.T
                else:
                    d_dy = torch.addmm(bias_gradient, x, gradient.T)
            if dy is not None and gradient is not None:
                d_x = dy @ gradient
        return d_dy, d_x, None


def _results(
    tensors: tuple[Any, ...], problem: WeightGradientProblem, path: str, options: Any, saving: bool
) -> Results:
    dy, x = tensors
    db = Result((dy.shape[1],), dy.dtype) if problem.bias else None
    return [Result((dy.shape[1], x.shape[1]), dy.dtype), db], []


COMPOSITE = Composite(weight_gradient)
KERNELS = KernelCall(
    "weight_gradient",
    WeightGradientFunction,
    WeightGradientProblem,
    tensors="dy x",
    saved=(0, 1),
    arguments=lambda plan: {"plan": plan},
    results=_results,
    plain_backward=True,
)
