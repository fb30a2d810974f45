"""Who runs a case: plain torch, compiled torch, our planner's choice, and our kernels by force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import planning
from ..devices import describe
from ..planning import Plan
from .cases import Case, Options, Results
from .work import Work

EAGER, COMPILED, AUTO, FUSED = "torch eager", "torch.compile", "auto", "fused"
# Only for those who ask: tuning takes about ten seconds a product, and checkpoints are for layers that keep something.
AUTOTUNED, CHECKPOINTED = "max-autotune", "checkpoint"
TORCH_CONTENDERS = (EAGER, COMPILED, AUTOTUNED, CHECKPOINTED)

# What the user has set must not decide what is measured: each contender sets both.
AUTO_SWITCHES = {"FUSEDLAYERS_BACKEND": "auto", "FUSEDLAYERS_STRICT": "0"}
FUSED_SWITCHES = {"FUSEDLAYERS_BACKEND": "triton", "FUSEDLAYERS_STRICT": "0"}


@dataclass(frozen=True)
class Contender:
    """``call`` takes the inputs of the case by name; ``switches`` are environment variables that hold meanwhile.

    ``saves``: what is kept for a backward pass is what autograd saves, and can be counted. ``recorded``: it is timed
    inside a CUDA graph, too.
    """

    name: str
    call: Callable[..., Results]
    switches: Mapping[str, str] = field(default_factory=dict)
    saves: bool = True
    recorded: bool = True


def contender(name: str, case: Case, options: Options) -> Contender:
    """The contender of that name for a case and its options."""
    if name in TORCH_CONTENDERS:
        keywords = case.keywords(options)

        def expression(**inputs: Tensor) -> Results:
            return case.torch_expression(**inputs, **keywords)

        if name == EAGER:
            return Contender(name, expression)
        if name == CHECKPOINTED:
            # The forward pass keeps its inputs alone, and the backward pass repeats it; what is drawn is not restored.
            return Contender(name, partial(_checkpointed, expression), saves=False)
        # Static shapes and one graph: what is fastest for torch. The timing decides whether to capture it, too.
        mode = "max-autotune-no-cudagraphs" if name == AUTOTUNED else None
        return Contender(name, torch.compile(expression, dynamic=False, fullgraph=True, mode=mode))
    our_keywords = case.our_keywords(options)
    switches = AUTO_SWITCHES if name == AUTO else FUSED_SWITCHES
    return Contender(name, lambda **inputs: case.ours(**inputs, **our_keywords), switches)


def _checkpointed(expression: Callable[..., Results], **inputs: Tensor) -> Results:
    return checkpoint(partial(expression, **inputs), use_reentrant=False, preserve_rng_state=False)


def our_plan(case: Case, options: Options, work: Work, captured: bool = False, backend: str = "auto") -> Plan:
    """What auto mode, or another backend, plans for this work: launched one by one, or captured in a CUDA graph.

    Its ``unsupported`` says why the kernels cannot be forced.
    """
    with torch.set_grad_enabled(work.backward):
        problem = replace(case.problem(work.inputs, options), captured=captured)
    return planning.plan(problem, describe(work.device), backend)


def our_paths(case: Case, options: Options, work: Work) -> dict[str, tuple[str, str]]:
    """The paths of auto mode and of the forced kernels, each launched one by one and in a CUDA graph."""
    launched, captured = (our_plan(case, options, work, captured).path for captured in (False, True))
    forced = our_plan(case, options, work, backend="triton").path
    return {AUTO: (launched, captured), FUSED: (forced, forced)}


def why_untimed(device: torch.device) -> str:
    """Why times of kernels on this device are worth nothing, or an empty text."""
    return "" if device.type == "cuda" else "the interpreter's time means nothing"


def why_not_forced(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot be verified here, or None."""
    if plan.unsupported is not None:
        return plan.unsupported
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return None
