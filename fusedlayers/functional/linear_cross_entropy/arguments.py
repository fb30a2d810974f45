"""Checks of the arguments of ``linear_cross_entropy`` and ``linear_log_probs``, and their planning problem."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...planning.linear_cross_entropy import LossProblem
from ...reference.losses import IGNORED
from ..call import call_facts, wants_gradient
from ..operands import describe_tensor
from ..options import checked_choice, checked_flag, checked_number
from ..shapes import Shapes
from ..switches import workspace_limit

REDUCTIONS = ("none", "mean", "sum")
# The options that are numbers: what errors say is expected, and what is.
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "label_smoothing": ("a number from 0 to 1", lambda number: 0 <= number <= 1),
    "softcap": ("a positive number or None", lambda number: number > 0),
    "logit_scale": ("a finite number", math.isfinite),
    "z_loss": ("a number from 0 on", lambda number: number >= 0),
}
_LAYER = "input: *B K, linear_weight: V *D K, target: {target}, linear_bias?: V *D, weight?: float(V)"
_SPARSE = "input linear_weight"
_CLASSES = Shapes(_LAYER.format(target="class(*B *D)"), _SPARSE)
_PROBABILITIES = Shapes(
    _LAYER.format(target="float(*B V *D)"), _SPARSE, note="; classes [*B, *D] are torch.int64 or torch.uint8"
)
LOG_PROBS_SHAPES = Shapes("input: *B K, linear_weight: V K, target: class(*B), linear_bias?: V", _SPARSE)


def check_loss(tensors: Sequence[Any], ignore_index: Any) -> None:
    """Checks the tensors, but not the values of the target, and what depends on the kind of target."""
    input, linear_weight, target, _, weight = tensors
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    shapes = _PROBABILITIES if probabilities else _CLASSES
    shapes.check(*tensors)
    if linear_weight.dim() > 2 and input.dim() < 2:
        because = f"as linear_weight is [V, *D, K] = {list(linear_weight.shape)}"
        raise ValueError(f"{describe_tensor('input', input)}: expected [*B, K], at least two dimensions, {because}")
    if probabilities and ignore_index is not None:
        raise ValueError(
            f"ignore_index must be None where target holds probabilities, as it names a class, got {ignore_index!r}"
        )
    check_no_gradient(weight)


def check_no_gradient(weight: Tensor | None) -> None:
    """Checks that the weights of the classes require no gradient."""
    if weight is not None and wants_gradient(weight):
        raise ValueError(f"{describe_tensor('weight', weight)} requires a gradient, and class weights have none")


def checked_ignore_index(ignore_index: Any) -> int:
    """An int of 64 bits; torch's default for None."""
    if ignore_index is None:
        return IGNORED
    if type(ignore_index) is not int:
        raise TypeError(f"ignore_index must be an int or None, got {ignore_index!r} ({type(ignore_index).__name__})")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be an int of 64 bits, got {ignore_index!r}")
    return ignore_index


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a loss by name; numbers become floats, and an ``ignore_index`` of None becomes torch's default."""
    checked = dict(options)
    for name, value in options.items():
        if name == "reduction":
            checked_choice(name, value, REDUCTIONS)
        elif name == "ignore_index":
            checked[name] = checked_ignore_index(value)
        elif name not in _NUMBERS:
            checked_flag(name, value)
        elif name != "softcap" or value is not None:
            checked[name] = checked_number(name, value, *_NUMBERS[name])
    return checked


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
