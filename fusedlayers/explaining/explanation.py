"""What `explain` returns: the explanation of one call, or of a model with one line per block."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import planning
from ..functional.operands import input_precision
from ..functional.operation import Operation
from ..functional.switches import backend
from ..planning import CARDS, Decision, Device
from ..planning.avoiding import WHY_AVOIDED
from ..planning.float8 import IN_16_BITS


@dataclass(frozen=True, repr=False)
class Explanation:
    """What one call would do; it prints as its ``lines``.

    ``path`` is the plan's: "torch", or how this library runs the call ("fused", "epilogue", "chunked" ...). ``reason``
    says why. ``saved_bytes`` are saved for the backward pass, and ``saved_by_torch`` are what torch's own operations
    would save; None if the module's own forward runs, for which nothing is planned.

    ``seconds`` is a lower bound: the larger of the path's FLOPs divided by the GPU's measured peak rate in 16 bits, and
    the least bytes that it moves divided by the measured peak memory bandwidth, forward and backward. Launches and
    kernel inefficiency come on top. None if no peak rates are on record, and in float32 and float64.

    ``details`` is the long text that ``explain(..., details=True)`` returns.
    """

    path: str
    reason: str
    seconds: float | None
    saved_bytes: int | None
    saved_by_torch: int | None
    lines: tuple[str, ...]
    details: str

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


@dataclass(frozen=True)
class BlockExplanation:
    """One block of a model: its path in the model ("": the model itself), its class, and its explanation."""

    path: str
    module: str
    explanation: Explanation


@dataclass(frozen=True, repr=False)
class ModelExplanation:
    """What the fused blocks of a model would do with this number of ``tokens``; prints one line per block."""

    module: str
    tokens: int
    blocks: tuple[BlockExplanation, ...]

    @property
    def seconds(self) -> float | None:
        """The sum of the blocks' ``seconds``; None if any is not known."""
        return _total(block.explanation.seconds for block in self.blocks)

    @property
    def saved_bytes(self) -> int | None:
        """The sum of the blocks' ``saved_bytes``; None if any is not known."""
        return _total(block.explanation.saved_bytes for block in self.blocks)

    @property
    def saved_by_torch(self) -> int | None:
        """The sum of the blocks' ``saved_by_torch``; None if any is not known."""
        return _total(block.explanation.saved_by_torch for block in self.blocks)

    @property
    def details(self) -> str:
        """The long text of every block, below its path."""
        return "\n\n".join(f"{block.path or '(model)'}\n{block.explanation.details}" for block in self.blocks)

    def __str__(self) -> str:
        kept = _kept(self.saved_bytes, self.saved_by_torch)
        count = f"{len(self.blocks)} block{'s' if len(self.blocks) > 1 else ''}"
        title = f"{self.module}: {count}, {self.tokens:,} tokens{kept and f'; keeps {kept}'}"
        rows = [(block.path or "(model)", block.module, _in_short(block.explanation)) for block in self.blocks]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {path:<{widths[0]}}  {module:<{widths[1]}}  {text}" for path, module, text in rows]
        return "\n".join([title, *lines])

    __repr__ = __str__


def explanation_of(
    operation: Operation,
    plan: Decision,
    facts: Device,
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...],
    in_8_bits: Any = None,
) -> Explanation:
    """The explanation of a call by its plan, on a device with these facts.

    ``in_8_bits`` is the problem of the same call in 8 bits, if that was requested: another device may run it so.
    """
    problem = plan.problem
    summary = plan.summary(facts)
    theirs = problem.kept_by_torch(facts) if problem.training else 0
    kept = _kept(plan.saved_bytes, theirs) or "nothing"
    kept += " for the backward pass" if problem.training else ", as no gradient is wanted"
    least = "" if plan.floor_seconds is None else f", at least {1e6 * plan.floor_seconds:,.1f} µs"
    rows = [
        ("call", f"{problem.described}, on {facts.name}{least}"),
        ("keeps", kept),
        *_recomputed(operation, plan, facts, tensors, options),
        ("elsewhere", _elsewhere(plan, facts, in_8_bits)),
    ]
    return Explanation(
        plan.path,
        plan.why_torch(facts) if plan.path == "torch" else plan.reason,
        plan.floor_seconds,
        plan.saved_bytes,
        theirs,
        (summary, *_aligned(rows)),
        _details(operation, plan, facts, tensors, options),
    )


def in_16_bits(found: Explanation, reason: str) -> Explanation:
    """The explanation of a call that runs in 16 bits although 8 were requested, with the ``reason``."""
    summary, *rest = found.lines
    row = "  precision  " + reason
    text = summary.replace("Runs ", f"Runs in 16 bits ({reason}), ", 1)
    return replace(found, lines=(text, *rest), details=f"{found.details}\n{row}")


def problem_on(problem: Any, facts: Device) -> Any:
    """The problem for a device with these facts, whatever the tensors are on: on a GPU float32 may run in TF32."""
    if facts.kind != "cuda" or problem.dtype != "float32":
        return problem
    return replace(problem, input_precision=input_precision(torch.device("cuda"), torch.float32))


def _recomputed(
    operation: Operation, plan: Decision, facts: Device, tensors: Sequence[Tensor | None], options: tuple[Any, ...]
) -> list[tuple[str, str]]:
    """What ``recompute=True`` would save and cost; if it is set, what the default would save and cost."""
    if "recompute" not in operation.option_names:
        return []
    place = operation.option_names.index("recompute")
    default = inspect.signature(operation.function).parameters["recompute"].default
    wish = default if options[place] is True else True
    other = planning.plan(
        problem_on(operation.problem(tensors, (*options[:place], wish, *options[place + 1 :])), facts), facts, backend()
    )
    name = f"recompute={wish!r}"
    costs = (other.path, other.saved_bytes, other.flops, other.workspace_bytes)
    if costs == (plan.path, plan.saved_bytes, plan.flops, plan.workspace_bytes):
        return [(name, "would change nothing")]
    texts = [f"would keep {_mib(other.saved_bytes)}"] if plan.problem.training else []
    times = other.flops / plan.flops if plan.flops else 1
    texts.append("compute as much" if times == 1 else f"compute {times:.2f} times the FLOPs")
    texts.append(f"take {_mib(other.workspace_bytes)} of temporary memory instead of {_mib(plan.workspace_bytes)}")
    if not plan.problem.training:
        texts[0] = f"would {texts[0]}"
    return [(name, f"{', '.join(texts[:-1])} and {texts[-1]}")]


def _elsewhere(plan: Decision, facts: Device, in_8_bits: Any) -> str:
    """What other GPUs than this one would do with the call."""
    found: dict[str, list[str]] = {}
    for name, other in CARDS.items():
        if other.name != facts.name:
            made = planning.plan(problem_on(plan.problem, other), other, backend())
            if in_8_bits is not None:
                asked = planning.plan(problem_on(in_8_bits, other), other, backend())
                made = made if asked.path == IN_16_BITS else asked
            where = "through torch" if made.path == "torch" else made.runs()
            found.setdefault("do the same" if made.path == plan.path else f"run it {where}", []).append(name)
    return "; ".join(f"an {' or '.join(names)} would {words}" for words, names in found.items())


def _in_short(explained: Explanation) -> str:
    """One line of a block: what runs, and what is saved."""
    summary = explained.lines[0]
    kept = _kept(explained.saved_bytes, explained.saved_by_torch)
    # What follows the colon is mostly the bytes that the path saves, which are appended anyway.
    runs = summary.partition(":")[0] if kept and explained.path != "torch" else summary
    return f"{runs.removesuffix('.')}{kept and f'; keeps {kept}'}"


def _kept(ours: int | None, theirs: int | None) -> str:
    """The bytes saved by us and by torch; empty if both save nothing, or if this is not known."""
    return f"{_mib(ours)}, torch {_mib(theirs)}" if ours or theirs else ""


def _mib(size: int | None) -> str:
    mib = (size or 0) / 2**20
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def _total(numbers: Iterable[Any]) -> Any:
    found = list(numbers)
    return None if None in found else sum(found)


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _details(
    operation: Operation, plan: Decision, facts: Device, tensors: Sequence[Tensor | None], options: tuple[Any, ...]
) -> str:
    rows = [*operation.facts(plan, facts), *_copies(operation, plan, tensors)]
    if facts.release_note:
        rows.append(("compiler", facts.release_note))
    rows += [("avoided", f"{name}: {WHY_AVOIDED} (python -m fusedlayers.bench selftest)") for name in plan.avoided]
    rows += [(f"not {path}", reason) for path, reason in plan.rejected]
    return "\n".join([plan.summary(facts), operation.title(plan.problem, tensors, options), *_aligned(rows)])


def _copies(operation: Operation, plan: Decision, tensors: Sequence[Tensor | None]) -> list[tuple[str, str]]:
    """The operands that a kernel cannot address by strides alone."""
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
