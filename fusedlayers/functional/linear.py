"""The linear layer whose products may split the axis they sum over: the public function and its autograd Function."""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kernels import split_k as kernels
from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..planning import LinearPlan, LinearProblem, ProductPlan
from .compiled import Composite, KernelCall, Result, Results
from .dispatch import (
    autocast,
    compute_dtype,
    planned,
    ran_as_kernels,
    recalled,
    rows,
    without_autocast,
)
from .linear_arguments import check_linear, linear_problem
from .signatures import signature
from .tracing import traced
from .weight_gradient import planned_weight_gradient


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    split_k: int | str = "auto",
    reduction: str = "workspace",
) -> Tensor:
    """``act(x Wᵀ + b)``, its inner axis split where few rows and columns would leave most of a GPU idle.

    The partial sums ``x[:, s] W[:, s]ᵀ`` of the ranges s are float32; they are added in a fixed order, bias and
    activation are applied once, and the result is rounded once. The data gradient ``dx = dz W`` sums over N, the
    weight gradient ``dW = dzᵀ x`` over the rows: each has a split of its own.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        weight: ``[N, K]``, ``nn.Linear``'s layout.
        bias: ``[N]`` or None.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, Hugging Face's name of one, or None.
        split_k: "auto" lets each of the three products take the split, or the torch path, that was measured fastest.
            An int from 1 on asks for kernels, and cuts the axis that each product sums over into that many ranges, or
            fewer: no range is empty, and the partial sums stay within 128 MiB.
        reduction: "workspace" keeps the partial sums apart and adds them in a fixed order: the same bits every time.
            "atomic" asks for kernels that add them up in memory, in float32 but in no fixed order.

    Returns:
        ``[*B, M, N]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation or
            ``reduction``, a ``split_k`` below 1.
        RuntimeError: ``reduction="atomic"`` under ``torch.use_deterministic_algorithms(True)``, or
            ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    if torch.compiler.is_dynamo_compiling():
        return COMPOSITE(x, weight, bias, activation, split_k, reduction)[0]
    # Whether atomic addition is allowed is a matter of the moment.
    call = None if reduction == "atomic" else signature("linear", (x, weight, bias), activation, split_k, reduction)
    known = None if call is None else recalled(call, x.device)
    if known is None:
        activation = canonical_activation(activation)
        check_linear(x, weight, bias, split_k, reduction)
        options: dict[str, Any] = {"activation": activation, "split_k": split_k, "reduction": reduction}
        known = planned(call, linear_problem(x, weight, bias, **options), x.device)
    problem, plan = known
    if plan.path == "torch":
        return reference.linear(x, weight, bias, activation=problem.activation)
    x_rows, weight, bias = autocast((x, weight, bias), compute_dtype(x))
    x_rows = rows(x_rows)
    with without_autocast(x.device):
        if call is None and traced():
            y: Tensor = KERNELS((x_rows, weight, bias), problem, plan)
        elif problem.training or call is None:
            y = LinearFunction.apply(x_rows, weight, bias, plan)
        else:
            y = _forward(x_rows, weight, bias, plan)
        if problem.training:
            y = ACTIVATIONS[problem.activation].torch(y)
    if not problem.training:
        ran_as_kernels(problem, x.device)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """``x Wᵀ + b``, activated where no gradient is wanted."""
    activation = "identity" if plan.problem.training else plan.problem.activation
    return _product(x, weight, bias, plan, plan.forward, activation)


def _product(
    left: Tensor, right: Tensor, bias: Tensor | None, plan: LinearPlan, product: ProductPlan, activation: str
) -> Tensor:
    """``act(left rightᵀ + bias)``, as this product of the layer is planned."""
    problem = plan.problem
    if product.tiles is None:
        with without_autocast(left.device):
            return reference.linear(left, right, bias, activation=activation)
    return kernels.product(
        left,
        right,
        bias,
        product.splits,
        product.tiles,
        activation=activation,
        accuracy=plan.accuracy,
        input_precision=problem.input_precision,
        atomic=problem.atomic,
        dependent=plan.dependent,
    )


class LinearFunction(torch.autograd.Function):
    """:func:`_forward` for x ``[M, K]`` and W ``[N, K]``, and its gradients, each as the plan has it.

    Activations are torch's own while gradients are wanted: it keeps their argument ``[M, N]``, as small as the result,
    and differentiates them as often as asked.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        ctx.plan = plan
        # Each operand is needed for the gradient of the other one.
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return _forward(x, weight, bias, plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.resolve_neg()  # kernels read memory as it is
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        plan = ctx.plan
        dx = dw = db = None
        # Plain products can be differentiated again.
        differentiable = torch.is_grad_enabled()
        with without_autocast(dy.device):
            if wants_x and (differentiable or plan.data_gradient is None):
                dx = dy @ weight
            elif wants_x:
                dx = _product(dy, weight.T, None, plan, plan.data_gradient, "identity")
            if wants_weight and not differentiable and plan.weight_gradient is not None:
                dw, db = planned_weight_gradient(dy, x, plan.weight_gradient)
            elif wants_weight:
                dw, db = reference.weight_gradient(dy, x, bias=wants_bias)
            elif wants_bias:
                db = dy.sum(0)
        ran_as_kernels(plan.problem, dy.device)
        return dx, dw, db, None


def _results(tensors: tuple[Any, ...], problem: LinearProblem, path: str, options: Any, saving: bool) -> Results:
    x, weight, _ = tensors
    return [Result((x.shape[0], weight.shape[0]), x.dtype)], []


COMPOSITE = Composite(linear)
KERNELS = KernelCall(
    "linear",
    LinearFunction,
    LinearProblem,
    tensors="x weight bias?",
    saved=(0, 1),
    arguments=lambda plan: {"plan": plan},
    results=_results,
)
