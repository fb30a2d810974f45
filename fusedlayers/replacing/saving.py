"""For the report: what an FFN, a loss or a norm saves for its backward pass, and whether kernels can run it at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import planning
from ..devices import describe
from ..functional.dispatch import facts_for
from ..functional.linear import LINEAR
from ..functional.linear_cross_entropy.arguments import loss_problem
from ..functional.moe_ffn import MOE_FFN
from ..functional.operands import compute_dtype
from ..functional.operation import Operation
from ..functional.switches import backend
from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..modules import FFNPieces, linear_weight
from ..planning import Device
from ..planning.costs import SAVED_FOR_SLOPE, mask_bytes
from ..planning.linear_cross_entropy import saved_bytes as kept_for_loss
from .expert_ffns import ExpertsFFN
from .recognising_norms import WHY_NOT_FLOAT32, Norm
from .remembering import Remembered
from .rules import LinearRule

# A training batch: large enough that the planner does not reject it as too small.
TOKENS = 65_536


def facts_of_ffn(
    pieces: FFNPieces, recompute: Literal["auto"] | bool | int, on: Device | None, precision: str | None = None
) -> tuple[tuple[int, int], str | None, str]:
    """``saved_bytes``, ``why_no_kernels`` and ``plan`` of an entry of the report, here or on another GPU.

    The bytes are those that torch and ``functional.ffn`` save per token of a training batch: of the FFN with its input,
    and of the dropout of its result, which torch applies in both.
    """
    up, down = linear_weight(pieces.up), linear_weight(pieces.down)
    with torch.enable_grad():
        # The layout of a batch, without its memory.
        x = torch.empty(TOKENS, up.shape[1], dtype=up.dtype, device="meta", requires_grad=True)
        tensors, options = pieces.operation.bound(**pieces.arguments(x, None, recompute, precision))
        plan, device = _planned(pieces.operation, tensors, options, on, up.device)
    problem: Any = plan.problem
    ours = plan.saved_bytes // TOKENS
    theirs = problem.kept_by_torch(device) // TOKENS
    result = 0
    if problem.training:
        beyond = _kept_for_slope(pieces.original) - SAVED_FOR_SLOPE.get(pieces.activation, 0)
        theirs += beyond * problem.element_bytes * problem.N
        if pieces.output_dropout_p:
            result = mask_bytes(problem, device) * down.shape[0]
    return (theirs + result, ours + result), _why_no_kernels(problem, device, backend()), plan.path


def facts_of_experts(
    module: nn.Module, found: ExpertsFFN, recompute: Literal["auto"] | bool | int, on: Device | None
) -> tuple[tuple[int, int] | None, str | None, str]:
    """:func:`facts_of_ffn` for experts; no bytes if the model's configuration does not give the experts per token."""
    given = found.tensors(module)
    width, chosen, weight = routing_of_experts(module, found)
    with torch.enable_grad():
        x = torch.empty(TOKENS, width, dtype=weight.dtype, device="meta", requires_grad=True)
        index = torch.empty(TOKENS, chosen or 1, dtype=torch.int64, device="meta")
        scores = torch.empty(TOKENS, chosen or 1, dtype=weight.dtype, device="meta", requires_grad=True)
        tensors, options = MOE_FFN.bound(x, index, scores, **given, **dict(found.formula), recompute=recompute is True)
        problem = MOE_FFN.problem(tensors, options)
    device = on or _facts(problem, weight.device)
    plan = planning.plan(problem, device, backend())
    theirs = 0 if chosen is None else problem.kept_by_torch(device) // TOKENS
    saved = (theirs, plan.saved_bytes // TOKENS) if theirs else None
    return saved, _why_no_kernels(problem, device, backend()), plan.path


def routing_of_experts(module: nn.Module, found: ExpertsFFN) -> tuple[int, int | None, Tensor]:
    """(width of a token, experts per token or None if the configuration does not give it, a weight)."""
    weight = found.tensors(module)["w_up"]
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    width = weight.shape[1 if dict(found.formula)["transposed"] else 2]
    return width, top_k if isinstance(top_k, int) else None, weight


def facts_of_head(head: nn.Linear, on: Device | None = None) -> tuple[tuple[int, int], str | None, str]:
    """:func:`facts_of_ffn` for the loss of a model's last linear layer: the mean over a training batch's tokens."""
    weight, bias = head.weight, head.bias
    with torch.enable_grad():
        x = torch.empty(TOKENS, weight.shape[1], dtype=compute_dtype(weight), device="meta", requires_grad=True)
        target = torch.empty(TOKENS, dtype=torch.int64, device="meta")
        problem = loss_problem(x, weight, target, bias, reduction="mean")
    device = on or _facts(problem, weight.device)
    plan = planning.plan(problem, device, backend())
    saved = kept_for_loss(problem, chunked=False) // TOKENS, plan.saved_bytes // TOKENS
    return saved, _why_no_kernels(problem, device, backend()), plan.path


def facts_of_norm(module: nn.Module, norm: Norm, on: Device | None) -> tuple[tuple[int, int] | None, str | None]:
    """:func:`facts_of_ffn` for a norm, without the path: its kernels are torch's, which has them only for GPUs."""
    parameters = list(module.parameters())
    other = None if on else next((each.device.type for each in parameters if not each.is_cuda), None)
    if other is not None:
        return None, f"torch has no fused norms on {other}"
    kept = kept_by_norm(module, norm)
    if any(each.dtype is torch.float32 for each in parameters):
        return None if kept is None else (kept[0], kept[0]), WHY_NOT_FLOAT32
    return kept, None


def kept_by_norm(module: nn.Module, norm: Norm) -> tuple[int, int] | None:
    """Bytes per token of (the forward as written, torch's fused norm); the input counts only if it is saved.

    None if the forward takes any width.
    """
    if norm.width is None:
        return None
    dtype = next((each.dtype for each in module.parameters()), torch.get_default_dtype())
    theirs = _kept_by_forward.get(
        (type(module), type(module).forward, norm, dtype), lambda: _kept_by_row(module, norm.width or 0, dtype)
    )
    # The input, in float32 if the weight is 1 + parameter; and per row the factor and, of a layer norm, the mean.
    itemsize = max(4, dtype.itemsize) if norm.one_plus else dtype.itemsize
    return theirs, norm.width * itemsize + (4 if norm.operation == "rms_norm" else 8)


_kept_by_forward: Remembered[int] = Remembered()


def _kept_by_row(module: nn.Module, width: int, dtype: torch.dtype) -> int:
    """The bytes that the forward of a norm saves per row; it runs on the meta device."""
    twin = object.__new__(type(module))
    twin.__dict__ = vars(module) | {
        "_parameters": {
            name: None if each is None else nn.Parameter(torch.empty_like(each, device="meta"))
            for name, each in module._parameters.items()
        }
    }
    found = []
    for rows in (1, 3):
        x = torch.empty(rows, width, dtype=dtype, device="meta", requires_grad=True)
        kept, _ = _kept(lambda x: type(module).forward(twin, x), x)
        found.append(sum(each.untyped_storage().nbytes() for each in kept))
    return (found[1] - found[0]) // 2


def why_no_kernels_for_linear(linear: nn.Linear, rule: LinearRule, on: Device | None) -> str | None:
    """Why no kernel runs a linear that ``rule`` takes, or None."""
    x = linear.weight.detach().new_empty(1, linear.in_features)
    problem = LINEAR.problem((x, linear.weight, linear.bias), ("identity", rule.split_k, rule.reduction, None))
    # A rule with a number of splits, or with atomic addition, asks for kernels.
    wish = "triton" if problem.asks_for_kernels and backend() == "auto" else backend()
    return _why_no_kernels(problem, on or describe(x.device), wish)


def _planned(
    operation: Operation, tensors: Sequence[Any], options: tuple[Any, ...], on: Device | None, device: torch.device
) -> tuple[Any, Device]:
    """The plan of the operation that runs this call, and the device that it is for."""
    variant = operation.variant(options)
    problem = variant.problem(tensors, options)
    facts = on or _facts(problem, device)
    plan = planning.plan(problem, facts, backend())
    other = variant.instead(plan, options)
    return (plan, facts) if other is None else _planned(other[0], tensors, other[1], on, device)


def why_in_16_bits(operation: Operation, given: dict[str, Any], on: Device | None) -> str | None:
    """Why a training batch of a call that asks for 8 bits runs in 16, or None; ``given`` lacks x.

    Of float32 weights: why it would do so under autocast.
    """
    weight = next(iter(given.values()))
    with torch.enable_grad():
        x = torch.empty(TOKENS, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True)
        tensors, options = operation.bound(x=x, **given)
        variant = operation.variant(options)
        problem: Any = variant.problem(tensors, options)
    if problem.dtype == "float32":
        problem = replace(problem, dtype="bfloat16")
    plan = planning.plan(problem, on or _facts(problem, weight.device), backend())
    return None if variant.instead(plan, options) is None else str(plan.reason)


def _facts(problem: Any, device: torch.device) -> Device:
    """The device for planning. This tests an unknown release of Triton now, before the model is compiled or
    captured."""
    facts_for(problem, device, backend())
    return describe(device)


def _why_no_kernels(problem: Any, device: Device, wish: str) -> str | None:
    """Why no call runs in a kernel, whatever its size: because of the device, or of a dtype that autocast may
    change."""
    for_the_device = planning.why_never_kernels(replace(problem, dtype="bfloat16"), device, wish)
    if for_the_device is not None:
        return for_the_device
    reason = planning.why_never_kernels(problem, device, wish)
    return None if reason is None else f"{reason} (unless autocast changes the dtype)"


def _kept_for_slope(activation: object) -> int:
    """The number of tensors of its input's size that an activation saves beside its value, counted: some are Python
    code."""
    run = ACTIVATIONS[canonical_activation(activation)].torch if isinstance(activation, str) else activation
    assert callable(run)
    # x + 0, because a leaf must not be changed in place.
    kept, value = _kept(lambda x: run(x + 0), torch.zeros(64, requires_grad=True, device="cpu"))
    return sum(tensor.numel() == value.numel() for tensor in kept)


def _kept(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """(tensors that autograd saves in a call, one per storage and without the result's storage; the result)."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage()._cdata, tensor)

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        y = run(x)
    kept.pop(y.untyped_storage()._cdata, None)
    return [*kept.values()], y
