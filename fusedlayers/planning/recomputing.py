"""What an FFN's backward pass may keep or compute again: the bytes and the products of each choice."""

from dataclasses import dataclass, replace

from . import choosing, ffn_epilogue
from .call import Facts
from .costs import gemm_units
from .devices import Device
from .gemm_gemm import Plan, Problem, plan_on, why_unsupported


@dataclass(frozen=True)
class Choice:
    """A path, and what it costs; ``why_not`` says why it cannot run these operands on this device.

    ``extra_units`` are the GEMM units (products of tokens × K × N) that it computes beyond torch, which computes none
    twice.
    """

    name: str  # "save", "recompute" or "chunked"
    path: str
    saved_bytes: int = 0
    workspace_bytes: int = 0
    extra_units: float = 0.0
    why_not: str | None = None


def choices(problem: Problem, device: Device, chosen: Plan) -> tuple[Choice, ...]:
    """Every path of a training FFN, that of the ``chosen`` plan among them, from the one that keeps most."""
    free = replace(problem, recompute="auto", saved_limit=None)
    chunk_kernels = chosen.path == "chunked" and chosen.epilogue is not None
    found = []
    for name, path, why_not in (
        ("save", "torch", None),
        ("save", "epilogue", ffn_epilogue.why_unsupported(free, device)),
        ("recompute", "fused", why_unsupported(free, device)),
        ("chunked", "chunked", None),
    ):
        if why_not is not None:
            found.append(Choice(name, path, why_not=why_not))
            continue
        made = (
            chosen
            if path == chosen.path
            else plan_on(free, device, choosing.Choice(path, {}), chunk_kernels=chunk_kernels)
        )
        extra = made.forward_units + made.backward_units - sum(gemm_units(problem, "torch"))
        found.append(Choice(name, path, made.saved_bytes, made.workspace_bytes, extra))
    return tuple(found)


def facts(plan: Plan, device: Device) -> Facts:
    """The plan of an FFN as ``explain`` prints it, with what its backward pass could keep or compute again."""
    rows = plan.facts(device)
    if not plan.problem.training or plan.problem.empty:
        return rows
    for choice in choices(plan.problem, device, plan):
        text = choice.why_not
        if text is None:
            units = "GEMM unit" if choice.extra_units == 1 else "GEMM units"
            again = f"{choice.extra_units:g} {units} again" if choice.extra_units else "nothing again"
            text = f"keeps {choice.saved_bytes:,} bytes, computes {again}"
            text += f", takes {choice.workspace_bytes:,} bytes of temporary memory"
        # Add the path where the name does not say it.
        name = choice.name if choice.name == choice.path else f"{choice.name}, {choice.path}"
        rows.append((f"if {name}", text + (" (chosen)" if choice.path == plan.path else "")))
    return rows
