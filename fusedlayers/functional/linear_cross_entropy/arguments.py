"""Checks of the arguments of ``linear_cross_entropy`` and ``linear_log_probs``, and their planning problem."""

import math
from typing import Any

import torch
from torch import Tensor

from ...planning.linear_cross_entropy import LossProblem
from ..call import call_facts, wants_gradient
from ..operands import check_given, check_layout, check_shape, check_tensors, checked_number, said
from ..switches import workspace_limit

REDUCTIONS = ("none", "mean", "sum")


def check_layer(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None) -> None:
    """The tensors that the logits are made of, and the target's place; what the target holds is not looked at."""
    check_given(input=input, linear_weight=linear_weight, target=target)
    check_tensors({"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias})
    if input.dim() < 1:
        raise ValueError(f"{said('input', input)}: expected [*B, K], at least one dimension")
    shape, width = tuple(linear_weight.shape), input.shape[-1]
    if len(shape) != 2 or shape[1] != width:
        hint = " (it looks transposed)" if len(shape) == 2 and shape[0] == width else ""
        raise ValueError(
            f"{said('linear_weight', linear_weight)}: expected [V, K] with K = {width}, the last dimension of input "
            f"{list(input.shape)}{hint}"
        )
    check_shape("linear_bias", linear_bias, (linear_weight.shape[0],), "[V]", "as linear_weight has V rows")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    check_layout("target", target)
    if target.device != input.device:
        raise ValueError(f"{said('target', target)}: expected the device of input, {input.device}")


def check_classes(input: Tensor, target: Tensor, ignore_index: Any) -> None:
    """Targets are classes, one for each token."""
    if target.dtype != torch.int64:
        raise TypeError(f"{said('target', target)}: expected torch.int64, the class of each token")
    check_shape("target", target, tuple(input.shape[:-1]), "[*B]", f"as input is [*B, K] = {list(input.shape)}")
    check_ignore_index(ignore_index)


def check_class_weight(weight: Tensor | None, linear_weight: Tensor) -> None:
    """The weights of the classes."""
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor or None, got {type(weight).__name__}")
    check_layout("weight", weight)
    if not weight.is_floating_point():
        raise TypeError(f"{said('weight', weight)}: expected a real floating-point dtype")
    if weight.device != linear_weight.device:
        raise ValueError(f"{said('weight', weight)}: expected the device of linear_weight, {linear_weight.device}")
    check_shape("weight", weight, (linear_weight.shape[0],), "[V]", "as linear_weight has V rows")
    if wants_gradient(weight):
        raise ValueError(f"{said('weight', weight)} requires a gradient, and class weights have none")


def check_ignore_index(ignore_index: Any) -> None:
    """An int that a target may hold; torch's own function takes any of these, and so does this."""
    if type(ignore_index) is not int:
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r} ({type(ignore_index).__name__})")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be an int of 64 bits, got {ignore_index!r}")


def check_reduction(reduction: Any) -> None:
    """One of ``REDUCTIONS``."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


def checked_softcap(softcap: Any) -> float | None:
    """A positive number or None."""
    if softcap is not None and checked_number("softcap", softcap, "a positive number or None", 0.0) == 0:
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    return None if softcap is None else float(softcap)


def checked_scale(logit_scale: Any) -> float:
    """A finite number."""
    return checked_number("logit_scale", logit_scale, "a finite number")


def checked_smoothing(label_smoothing: Any) -> float:
    """A number between 0 and 1."""
    return checked_number("label_smoothing", label_smoothing, "a number from 0 to 1", 0.0, 1.0)


def checked_z_loss(z_loss: Any) -> float:
    """A number that is not negative."""
    return checked_number("z_loss", z_loss, "a number from 0 on", 0.0)


def loss_problem(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None = None,
    **facts: Any,
) -> LossProblem:
    """The planning problem of one call, its leading dims flattened into the tokens."""
    return LossProblem(
        M=math.prod(input.shape[:-1]),
        K=input.shape[-1],
        V=linear_weight.shape[0],
        biased=linear_bias is not None,
        weighted=weight is not None,
        probabilities=target.is_floating_point(),
        needs_data_gradient=wants_gradient(input),
        needs_weight_gradient=wants_gradient(linear_weight),
        needs_bias_gradient=wants_gradient(linear_bias),
        workspace_limit=workspace_limit(),
        **call_facts(input, linear_weight, target, linear_bias, weight),
        **facts,
    )
