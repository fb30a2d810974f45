"""Explains a plan: which path runs, what it costs, what it saves, and why the other paths were rejected."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from .. import planning
from ..devices import describe
from ..functional.dispatch import dispatch, plan_on_card
from ..functional.operation import Operation, operation_of
from ..planning import Device
from ..replacing.loss import FusedLossHead
from .explanation import BlockExplanation, Explanation, ModelExplanation, explanation_of, in_16_bits, problem_on
from .models import calls_of_model, function_and_arguments, is_model

__all__ = ["BlockExplanation", "Explanation", "ModelExplanation", "explain"]


@overload
def explain(
    target: nn.Module | Callable[..., Any],
    /,
    *inputs: Tensor,
    on: str | None = None,
    details: Literal[False] = False,
    **options: object,
) -> Any: ...


@overload
def explain(
    target: nn.Module | Callable[..., Any],
    /,
    *inputs: Tensor,
    on: str | None = None,
    details: Literal[True],
    **options: object,
) -> str: ...


def explain(
    target: nn.Module | Callable[..., Any],
    /,
    *inputs: Tensor,
    on: str | None = None,
    details: bool = False,
    **options: object,
) -> Explanation | ModelExplanation | str:
    """What ``target(*inputs)`` would do on this machine, or on another one; nothing is computed.

    Args:
        target: a :class:`FusedFFN`, :class:`FusedMoE`, :class:`SplitKLinear`, :class:`MaxSim` or
            :class:`LinearCrossEntropyLoss`, a module that :func:`replace` has fused, a function of ``functional``, or
            a model that holds such modules.
        inputs: the tensors of the call, on any device (``meta`` needs no memory); ``requires_grad`` of inputs and
            parameters, the grad mode, and autocast for the tensors' device count. Of a model's inputs only the first
            tensor is used, and only for its number of tokens M: all leading dims ``[*B, M]`` of a floating-point ``[*B,
            M, K]``, or every element of an integer tensor, such as token ids. Nothing runs, so every block is explained
            with M tokens of its own width, in the dtype of its weights or of autocast; its input requires a gradient if
            any parameter of the model does.
        on: the name of a GPU, "H100" or "H200": plan as if the tensors were on it and Triton were installed, with what
            is known of such a GPU without a calibration. None, the default, is the tensors' own device.
        details: return the whole text, as a string.
        options: the keyword arguments of the call.

    Returns:
        An :class:`Explanation` with ``path``, ``seconds``, ``saved_bytes`` and ``reason``, which prints as five lines:
        what runs and why; sizes and device; the MiB saved for the backward pass, and torch's; what ``recompute=True``
        would save and cost, if the operation has it; and what other GPUs would do. For a model a
        :class:`ModelExplanation`, which prints one line per block; norms, which are torch's, and :class:`MaxSim`, whose
        documents are not tokens of the input, have none.

        With ``details`` a string: one sentence that says what runs and what that gains, or why torch runs; the formula
        of the call; and lines naming path, reason, tiles, splits, GEMM units, FLOPs, bytes, saved bytes, temporary
        memory ("workspace"), the least time ("floor") if the device's peak rates are known, for an FFN in training the
        cost of each choice of saving or recomputing, and each rejected path with its reason.

    Raises:
        TypeError: ``target`` is none of these, or a model was given no tensor.
        ValueError: ``on`` is not the name of a known GPU.
    """
    found = _explained(target, inputs, options, None if on is None else planning.card(on))
    return found.details if details else found


def _explained(
    target: Any, inputs: Sequence[Any], options: dict[str, Any], facts: Device | None
) -> Explanation | ModelExplanation:
    if is_model(target, *inputs):
        return _model(target, inputs, options, facts)
    # A MaxSim has no weights, and only calls its function.
    function = getattr(target, "function", target)
    if isinstance(target, nn.Module) and hasattr(target, "call_arguments"):
        called = function_and_arguments(target, *inputs, **options)
        if isinstance(called, str):
            return _not_fused(target, called)
        inputs, (function, options) = (), called
    operation = operation_of(function)
    if operation is None:
        known = (
            "a FusedFFN, a FusedMoE, a SplitKLinear, a MaxSim, a LinearCrossEntropyLoss, a function of "
            "fusedlayers.functional, or one block of a model that replace() fused: an FFN, experts or a linear; or a "
            "model that holds such modules"
        )
        raise TypeError(f"target must be {known}, got {type(target).__name__}")
    tensors, others = operation.bound(*inputs, **options)
    others = operation.check(tensors, others)
    return _call(operation, tensors, others, tensors[0].device, facts)


def _call(
    operation: Operation,
    tensors: Sequence[Any],
    options: tuple[Any, ...],
    device: torch.device,
    facts: Device | None,
    in_8_bits: Any = None,
) -> Explanation:
    """The explanation of a checked call whose tensors are on ``device``, or on a GPU with these ``facts``.

    ``in_8_bits`` is the problem of the same call in 8 bits, if that was requested.
    """
    operation, card = operation.variant(options), facts
    problem = operation.problem(tensors, options)
    if facts is not None:
        plan = plan_on_card(problem_on(problem, facts), facts)
    else:
        # Describe the device again, because dispatch may have tested an unknown release of Triton.
        plan = dispatch(problem_on(problem, describe(device)), device)
        facts = describe(device)
    if (other := operation.instead(plan, options)) is not None:
        return in_16_bits(_call(other[0], tensors, other[1], device, card, plan.problem), plan.reason)
    return explanation_of(operation, plan, facts, tensors, options, in_8_bits)


def _model(model: nn.Module, inputs: Sequence[Any], options: dict[str, Any], facts: Device | None) -> ModelExplanation:
    x = next((each for each in (*inputs, *options.values()) if isinstance(each, Tensor)), None)
    if x is None:
        raise TypeError(f"a {type(model).__name__} is explained by its number of tokens: expected a tensor, got none")
    of_rows = (x.is_floating_point() or x.is_complex()) and x.dim() > 0
    tokens = x.shape[:-1].numel() if of_rows else x.numel()
    trained = any(parameter.requires_grad for parameter in model.parameters())
    blocks = []
    for path, module, found in calls_of_model(model, tokens, torch.is_grad_enabled() and (trained or x.requires_grad)):
        if isinstance(found, str):
            explained = _not_fused(module, found)
        else:
            given = found.operation.check(found.tensors, found.options)
            explained = _call(found.operation, found.tensors, given, found.device, facts)
        # The class of a model with a fused loss keeps its name.
        name = FusedLossHead.__name__ if isinstance(module, FusedLossHead) else type(module).__name__
        blocks.append(BlockExplanation(path, name, explained))
    return ModelExplanation(type(model).__name__, tokens, tuple(blocks))


def _not_fused(module: nn.Module, reason: str) -> Explanation:
    """The explanation of a module that runs its own forward, or calls its children."""
    instead = "calls its children instead of fusing them"
    if isinstance(module, (nn.Linear, FusedLossHead)):
        instead = "runs the forward of nn.Linear" if isinstance(module, nn.Linear) else "computes its logits"
    text = f"{type(module).__name__} {instead}: {reason}"
    return Explanation("torch", reason, None, None, None, (text,), text)
