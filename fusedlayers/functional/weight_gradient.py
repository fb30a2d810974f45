"""Weight and bias gradient of a linear layer: the public function, and its operation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import weight_gradient as kernels
from ..kernels.column_sums import column_sums
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import WeightGradientPlan, WeightGradientProblem
from .call import call_facts, wants_gradient
from .custom_ops import Result, Results
from .operands import rows, without_autocast
from .operation import Operation, Tensors
from .options import checked_flag
from .prepared import Prepared
from .shapes import Shapes


def weight_gradient(dy: Tensor, x: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """Weight and bias gradient of ``y = x Wᵀ + b``: ``dW = dyᵀ x`` and ``db = Σ dy``, in one pass over dy if faster.

    Args:
        dy: ``[*B, M, O]`` or ``[O]``: any leading dims, any strides; the gradients are sums over all of these rows.
        x: ``[*B, M, K]`` or ``[K]``, with the leading dims of dy.
        bias: whether db is wanted.

    Returns:
        dW ``[O, K]``, and db ``[O]`` or None, in the dtype of dy (under autocast: in autocast's dtype), summed in
        float32 and rounded once. float16, bfloat16 and float32 can run in Triton kernels; every floating dtype runs
        through torch. Both are differentiable in dy and x.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of dy.
        ValueError: leading dims that differ, tensors without a dimension or on different devices.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return WEIGHT_GRADIENT(dy, x, bias)


def planned_weight_gradient(
    dy: Tensor, x: Tensor, plan: WeightGradientPlan, ready: dict[Any, Any]
) -> tuple[Tensor, Tensor | None]:
    """dW and db (or None) of dy ``[M, O]`` and x ``[M, K]``, as planned; ``ready`` as in :class:`.Prepared`."""
    problem = plan.problem
    if plan.path == "sums":
        return torch.mm(dy.T, x), column_sums(dy, COLUMN_SUM_TILES, ready)
    if plan.tiles is None:
        return reference.weight_gradient(dy, x, bias=problem.bias)
    return kernels.weight_gradient(
        dy, x, problem.bias, plan.splits, problem.input_precision, plan.tiles, plan.pipeline, ready
    )


class _WeightGradient(Operation):
    """dW and db (or None) of dy ``[M, O]`` and x ``[M, K]``; its gradients are plain products, through torch."""

    problem_type = WeightGradientProblem
    shapes = Shapes("dy: *B M? O, x: *B M? K", sparse="x")
    operands = "dy x"
    row_operands = ("dy", "x")
    has_backward = False
    torch_takes_cast = True

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        self.shapes.check(*tensors)
        checked_flag("bias", *options)
        return options

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> WeightGradientProblem:
        dy, x = tensors
        return WeightGradientProblem(
            M=math.prod(dy.shape[:-1]),
            O=dy.shape[-1],
            K=x.shape[-1],
            bias=options[0],
            training=wants_gradient(dy, x),
            **call_facts(dy, x),
        )

    def title(self, problem: WeightGradientProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        return "weight_gradient: dW = dyᵀ x" + (", db = Σ dy" if problem.bias else "")

    def sees_through(self, call: Prepared) -> bool:
        # torch.compile's column sums are as fast as the kernel.
        return super().sees_through(call) or (call.observed and call.plan.path == "sums")

    def through_torch(self, call: Prepared, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        dy, x = tensors
        return reference.weight_gradient(dy, x, bias=call.problem.bias)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        return [rows(tensor) for tensor in tensors]

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        dy, x = operands
        return planned_weight_gradient(dy, x, call.plan, call.ready), ()

    def kept(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        # Each operand is needed for the gradient of the other one.
        return wanted[1], wanted[0]

    def constant(self, problem: Any, wanted: Sequence[bool]) -> Sequence[int]:
        # db is a sum of dy alone.
        return () if wanted[0] else (1,)

    def differentiable_gradients(
        self, call: Prepared, operands: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        (dy, x), (gradient, bias_gradient) = operands, upstream
        d_dy = d_x = None
        first = gradient if gradient is not None else bias_gradient
        with without_autocast(first.device):
            if wanted[0] and gradient is None:
                d_dy = bias_gradient.expand(x.shape[0], -1)
            elif wanted[0] and bias_gradient is None:
                d_dy = x @ gradient.T
            elif wanted[0]:
                d_dy = torch.addmm(bias_gradient, x, gradient.T)
            if wanted[1] and gradient is not None:
                d_x = dy @ gradient
        return d_dy, d_x

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        # In a backward pass an operand that no gradient needs is None.
        dtype = next(operand.dtype for operand in operands if operand is not None)
        return [Result((problem.O, problem.K), dtype), Result((problem.O,), dtype) if problem.bias else None], []

    def unpacked(self, found: list[Tensor], options: Sequence[Any], tensors: Tensors) -> Any:
        return found[0], found[1] if options[0] else None


WEIGHT_GRADIENT = _WeightGradient(weight_gradient)
