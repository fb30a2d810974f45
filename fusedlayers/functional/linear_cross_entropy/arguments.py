"""Checks of the arguments of ``linear_cross_entropy`` and ``linear_log_probs``, and their planning problem."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...planning.linear_cross_entropy import LossProblem
from ...reference.losses import IGNORED
from ..call import call_facts, wants_gradient
from ..operands import check_given, check_layout, check_shape, check_tensors, check_width, checked_number, said
from ..switches import workspace_limit

REDUCTIONS = ("none", "mean", "sum")


def check_layer(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, several: bool = False
) -> None:
    """Checks the operands of the logits, and type, layout and device of the target, but not its values.

    ``several``: also takes a weight ``[V, d1, ..., K]``, which gives a token several losses.
    """
    check_given(input=input, linear_weight=linear_weight, target=target)
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    check_tensors(tensors, sparse=("input", "linear_weight"))
    if input.dim() < 1:
        raise ValueError(f"{said('input', input)}: expected [*B, K], at least one dimension")
    shape = tuple(linear_weight.shape)
    many = several and len(shape) > 2
    if not (len(shape) == 2 or many):
        others = ", or [V, d1, ..., K]" if several else ", two dimensions"
        raise ValueError(f"{said('linear_weight', linear_weight)}: expected [V, K]{others}")
    check_width("input", input, "[*B, K]", "linear_weight", linear_weight)
    if many and input.dim() < 2:
        raise ValueError(
            f"{said('input', input)}: expected [*B, K], at least two dimensions, as linear_weight is [V, d1, ..., K] = "
            f"{list(shape)}"
        )
    if many:
        check_shape("linear_bias", linear_bias, shape[:-1], "[V, d1, ...]", f"as linear_weight is {list(shape)}")
    else:
        check_shape("linear_bias", linear_bias, (shape[0],), "[V]", "as linear_weight has V rows")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    check_layout("target", target)
    if target.device != input.device:
        raise ValueError(f"{said('target', target)}: expected the device of input, {input.device}")


def check_classes(input: Tensor, target: Tensor, out_features: Sequence[int] = ()) -> None:
    """Checks targets that are classes, one for each token, or for each of its ``out_features``."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"{said('target', target)}: expected torch.int64 or torch.uint8, the class of each token")
    letters = "[*B, d1, ...]" if out_features else "[*B]"
    because = f"as input is [*B, K] = {list(input.shape)}"
    if out_features:
        because += f" and linear_weight has d1, ... = {', '.join(map(str, out_features))}"
    check_shape("target", target, (*input.shape[:-1], *out_features), letters, because)


def check_probabilities(input: Tensor, linear_weight: Tensor, target: Tensor, ignore_index: Any) -> None:
    """Checks targets that are probabilities of all classes."""
    classes, *out_features = linear_weight.shape[:-1]
    expected = (*input.shape[:-1], classes, *out_features)
    if tuple(target.shape) != expected:
        more = ", d1, ..." if out_features else ""
        raise ValueError(
            f"{said('target', target)}: expected int64 classes [*B{more}] = {[*input.shape[:-1], *out_features]}, or "
            f"probabilities [*B, V{more}] = {list(expected)}"
        )
    if ignore_index is not None:
        raise ValueError(
            f"ignore_index must be None where target holds probabilities, as it names a class, got {ignore_index!r}"
        )


def check_class_weight(weight: Tensor | None, linear_weight: Tensor) -> None:
    """Checks the weights of the classes."""
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


def checked_ignore_index(ignore_index: Any) -> int:
    """An int of 64 bits; torch's default for None."""
    if ignore_index is None:
        return IGNORED
    if type(ignore_index) is not int:
        raise TypeError(f"ignore_index must be an int or None, got {ignore_index!r} ({type(ignore_index).__name__})")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be an int of 64 bits, got {ignore_index!r}")
    return ignore_index


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
        positions=math.prod(linear_weight.shape[1:-1]) if linear_weight.dim() > 2 else None,
        biased=linear_bias is not None,
        probabilities=target.is_floating_point(),
        trains_weight=linear_weight.requires_grad,
        needs_data_gradient=wants_gradient(input),
        needs_weight_gradient=wants_gradient(linear_weight),
        needs_bias_gradient=wants_gradient(linear_bias),
        workspace_limit=workspace_limit(),
        **call_facts(input, linear_weight, target, linear_bias, weight),
        **facts,
    )
