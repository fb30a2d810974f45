"""Checks of the arguments of ``linear``, and what its planner needs to know of them."""

import math

import torch
from torch import Tensor

from ..planning import LinearProblem
from .arguments import check_shape, check_tensors, said
from .dispatch import captured, compute_dtype, subclass_of, wants_gradient
from .signatures import input_precision

REDUCTIONS = ("workspace", "atomic")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, split_k: int | str, reduction: str) -> None:
    """All arguments of ``functional.linear`` but the activation."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")
    check_tensors({"x": x, "weight": weight, "bias": bias})
    if x.dim() < 1:
        raise ValueError(f"{said('x', x)}: expected [*B, M, K], at least one dimension")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        hint = " (it looks transposed)" if weight.dim() == 2 and weight.shape[0] == x.shape[-1] else ""
        raise ValueError(
            f"{said('weight', weight)}: expected [N, K] with K = {x.shape[-1]}, the last dimension of x "
            f"{list(x.shape)}{hint}"
        )
    check_shape("bias", bias, (weight.shape[0],), "[N]", "as weight has N rows")
    check_split_k(split_k)
    check_reduction(reduction)
    if reduction == "atomic" and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            'linear with reduction="atomic" adds in no fixed order, and torch.use_deterministic_algorithms(True) is '
            'set; reduction="workspace" is deterministic'
        )


def check_split_k(split_k: int | str) -> None:
    """``"auto"`` or an int from 1 on; more than there are elements to sum over is as many as there are."""
    if split_k == "auto":
        return
    if type(split_k) is not int:
        raise TypeError(f'split_k must be "auto" or an int from 1 on, got {split_k!r} ({type(split_k).__name__})')
    if split_k < 1:
        raise ValueError(f'split_k must be "auto" or an int from 1 on, got {split_k}')


def check_reduction(reduction: str) -> None:
    """``"workspace"`` or ``"atomic"``."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


def linear_problem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    split_k: int | str = "auto",
    reduction: str = "workspace",
) -> LinearProblem:
    """The planning problem of one ``linear`` call, its leading dims flattened into rows."""
    dtype = compute_dtype(x)
    return LinearProblem(
        M=math.prod(x.shape[:-1]),
        N=weight.shape[0],
        K=x.shape[-1],
        dtype=str(dtype).removeprefix("torch."),
        activation=activation,
        bias=bias is not None,
        needs_data_gradient=wants_gradient(x),
        needs_weight_gradient=wants_gradient(weight),
        needs_bias_gradient=wants_gradient(bias),
        split_k=0 if isinstance(split_k, str) else split_k,
        atomic=reduction == "atomic",
        input_precision=input_precision(x.device, dtype),
        captured=captured(x.device),
        subclass=subclass_of(x, weight, bias),
    )
