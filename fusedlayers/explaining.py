"""A plan in words: which path runs, what it costs, what it keeps, and why the other paths were rejected."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from . import functional
from .devices import describe
from .functional.dispatch import dispatch
from .functional.operation import Operation, operation_of
from .planning import Decision
from .planning.avoiding import WHY_AVOIDED


def explain(target: nn.Module | Callable[..., Any], /, *inputs: Tensor, **options: object) -> str:
    """What ``target(*inputs)`` would do on this machine, as text; nothing is computed.

    Args:
        target: a :class:`FusedFFN`, :class:`FusedMoE`, :class:`SplitKLinear`, :class:`MaxSim` or
            :class:`LinearCrossEntropyLoss`, a module that :func:`replace` has fused, or a function of ``functional``.
        inputs: the tensors of the call; ``requires_grad`` of inputs and parameters and the grad mode count.
        options: the keyword arguments of the call.

    Returns:
        One sentence that says what runs and what that gains, or why torch runs; the formula of the call; and lines
        naming path, reason, tiles, splits, GEMM units, FLOPs, bytes, saved bytes, temporary memory ("workspace"), the
        least time ("floor") where the device's peak rates are known, for an FFN in training what each choice of saving
        or recomputing costs, and each rejected path with its reason.

    Raises:
        TypeError: ``target`` is none of these.
    """
    function: Any = getattr(target, "function", target)  # a MaxSim is nothing but its function
    if isinstance(target, nn.Module) and hasattr(target, "call_arguments"):
        fused: Any = target
        given = (*inputs, *(value for value in options.values() if isinstance(value, Tensor)))
        reason = fused.why_called(*given) if hasattr(fused, "why_called") else None
        if reason is not None:
            linear = isinstance(target, nn.Linear)
            instead = "runs the forward of nn.Linear" if linear else "calls its children instead of fusing them"
            return f"{type(target).__name__} {instead}: {reason}"
        inputs, options = (), fused.call_arguments(*inputs, **options)
        adapted = "up_scale" in options
        function = getattr(target, "function", functional.lora_ffn if adapted else functional.ffn)
    operation = operation_of(function)
    if operation is None:
        known = (
            "a FusedFFN, a FusedMoE, a SplitKLinear, a MaxSim, a LinearCrossEntropyLoss, a function of "
            "fusedlayers.functional, or one block of a model that replace() fused: an FFN, experts or a linear"
        )
        raise TypeError(f"target must be {known}, got {type(target).__name__}")
    tensors, given = operation.bound(*inputs, **options)
    given = operation.check(tensors, given)
    problem, device = operation.problem(tensors, given), tensors[0].device
    plan = dispatch(problem, device)
    facts = describe(device)
    rows = [*operation.facts(plan, facts), *_copies(operation, plan, tensors)]
    if facts.release_note:
        rows.append(("compiler", facts.release_note))
    rows += [("avoided", f"{name}: {WHY_AVOIDED} (python -m fusedlayers.bench selftest)") for name in plan.avoided]
    rows += [(f"not {path}", reason) for path, reason in plan.rejected]
    width = max(len(name) for name, _ in rows)
    heads = [plan.summary(facts), operation.title(problem, tensors, given)]
    return "\n".join([*heads, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _copies(operation: Operation, plan: Decision, tensors: Sequence[Tensor | None]) -> list[tuple[str, str]]:
    """The operands that a kernel cannot reach through strides alone."""
    texts = []
    for name, tensor in zip(operation.tensor_names, tensors, strict=True) if plan.path != "torch" else ():
        if tensor is None or name not in operation.row_operands:
            continue
        try:
            tensor.view(-1, tensor.shape[-1])
        except RuntimeError:
            where = f"{name} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            texts.append(f"{where} has no uniform rows: one contiguous copy")
    return [("copies", "; ".join(texts))] if texts else []
