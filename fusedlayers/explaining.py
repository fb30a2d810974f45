"""A plan in words: which path runs, what it costs, what it keeps, and why the other paths were rejected."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import functional
from .devices import describe
from .functional.arguments import check_ffn, check_gemm_gemm, check_hidden_gradient, check_weight_gradient
from .functional.dispatch import (
    dispatch,
    ffn_problem,
    gemm_gemm_problem,
    hidden_gradient_problem,
    weight_gradient_problem,
)
from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.tuning import CONSUMER_ROWS
from .planning import (
    Decision,
    Device,
    HiddenGradientPlan,
    HiddenGradientProblem,
    Plan,
    Problem,
    WeightGradientPlan,
    WeightGradientProblem,
)


def explain(target: nn.Module | Callable[..., Tensor], *inputs: Tensor, **options: object) -> str:
    """What ``target(*inputs)`` would do on this machine, as text; nothing is computed.

    Args:
        target: a :class:`FusedFFN`, a module that :func:`replace` has fused, or a function of ``functional``.
        inputs: the tensors of the call; ``requires_grad`` of inputs and parameters and the grad mode count.
        options: the keyword arguments of the call.

    Returns:
        Lines naming path, reason, tiles, splits, GEMM units, FLOPs, bytes, saved bytes, workspace, the floor time where
        the device's peak rates are known, and each rejected path with its reason.

    Raises:
        TypeError: ``target`` is none of these.
    """
    problem: Any
    if target is functional.weight_gradient:
        arguments = inspect.signature(functional.weight_gradient).bind(*inputs, **options).arguments
        check_weight_gradient(arguments["dy"], arguments["x"], arguments.get("bias", True))
        problem = weight_gradient_problem(**arguments)
        title = "weight_gradient: dW = dyᵀ x" + (", db = Σ dy" if problem.bias else "")
    elif target is functional.hidden_gradient:
        arguments = inspect.signature(functional.hidden_gradient).bind(*inputs, **options).arguments
        arguments["activation"] = canonical_activation(arguments["activation"])
        given = {"z_gate": None, "bias": True} | arguments
        check_hidden_gradient(given["dy"], given["w_down"], given["z"], given["z_gate"], given["bias"])
        problem = hidden_gradient_problem(**arguments)
        gate = "dH ⊙ act(z_gate), dH ⊙ z ⊙ act'(z_gate)" if problem.gated else "dH ⊙ act'(z)"
        title = f"hidden_gradient: {gate}, dH = dy W_down, act = {_formula(problem)}"
    elif target is functional.gemm_gemm:
        arguments = inspect.signature(functional.gemm_gemm).bind(*inputs, **options).arguments
        arguments["activation"] = canonical_activation(arguments.get("activation"))
        check_gemm_gemm(arguments["a"], arguments["b"], arguments["c"])
        problem = gemm_gemm_problem(**arguments)
        title = f"gemm_gemm: act(a @ b) @ c, act = {_formula(problem)}"
    elif target is functional.ffn:
        arguments = inspect.signature(functional.ffn).bind(*inputs, **options).arguments
        problem, title = _ffn(arguments)
    elif isinstance(target, nn.Module) and hasattr(target, "call_arguments"):
        fused: Any = target
        reason = fused.why_called(*inputs)
        if reason is not None:
            return f"{type(target).__name__} calls its children instead of fusing them: {reason}"
        arguments = fused.call_arguments(*inputs)
        problem, title = _ffn(arguments)
    else:
        known = "a FusedFFN, a module fused by replace(), or a function of functional"
        raise TypeError(f"target must be {known}, got {type(target).__name__}")
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    plan = dispatch(problem, device)
    rows = [*_FACTS.get(type(problem), _facts)(problem, plan, describe(device)), *_copies(problem, plan, arguments)]
    rows += [(f"not {path}", reason) for path, reason in plan.rejected]
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _ffn(arguments: dict[str, Any]) -> tuple[Problem, str]:
    given = {name: parameter.default for name, parameter in inspect.signature(functional.ffn).parameters.items()}
    given |= arguments
    given["activation"] = canonical_activation(given["activation"])
    check_ffn(**{name: value for name, value in given.items() if name != "activation"})
    problem = ffn_problem(**given)
    gate = "act(x W_gateᵀ) ⊙ (x W_upᵀ)" if problem.gated else "act(x W_upᵀ)"
    return problem, f"ffn: {gate} W_downᵀ, act = {_formula(problem)}"


# The operands of each operation that its kernels see as matrices of rows.
_ROWS = {"ffn": ("x",), "weight_gradient": ("dy", "x"), "hidden_gradient": ("dy", "z", "z_gate")}


def _copies(problem: Any, plan: Decision, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """The operands that a kernel cannot reach through strides alone."""
    texts = []
    for name in _ROWS.get(problem.operation, ()) if plan.path != "torch" else ():
        tensor = arguments.get(name)
        if tensor is None:
            continue
        try:
            tensor.view(-1, tensor.shape[-1])
        except RuntimeError:
            where = f"{name} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            texts.append(f"{where} has no uniform rows: one contiguous copy")
    return [("copies", "; ".join(texts))] if texts else []


def _formula(problem: Problem | HiddenGradientProblem) -> str:
    return f"{problem.activation}: {ACTIVATIONS[problem.activation].formula}"


def _facts(problem: Problem, plan: Plan, device: Device) -> list[tuple[str, str]]:
    p = problem
    if p.operation == "gemm_gemm":
        shape = f"B={p.batch} M={p.M} K={p.K} N={p.N} O={p.O}"
    else:
        shape = f"M={p.M} (tokens) K={p.K} (d_model) N={p.N} (d_ff) O={p.O}"
    rows = [
        ("problem", f"{shape}, {p.dtype}, {'forward and backward' if p.training else 'forward'}"),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]
    kernels = [("forward tiles", plan.forward_tiles)]
    if plan.stored is None:
        kernels.append(("data-gradient tiles", plan.data_gradient_tiles))
        kernels.append(("weight-gradient tiles", plan.weight_gradient_tiles))
    for name, tiles in kernels:
        if tiles is not None and tiles.pipelined is not None:
            config = tiles.pipelined
            sides = ("hidden units", "rows") if name.startswith("weight") else ("rows", "hidden columns")
            size = f"{CONSUMER_ROWS} {sides[0]} × {config.block} {sides[1]} for each consumer"
            rows.append((name, f"pipelined: {size}, consumers {config.consumers}, stages {config.stages}"))
        elif tiles is not None:
            size = f"{tiles.block_m} rows × {tiles.block_n} hidden columns"
            rows.append((name, f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"))
    if plan.stored is not None:
        config = plan.stored
        blocks = f"{config.consumers * CONSUMER_ROWS} rows × {config.block} hidden columns"
        rows.append(
            ("backward", "stores what is hidden, and its gradient, while it runs: fewer products than recomputing")
        )
        rows.append(
            ("hidden-gradient tiles", f"pipelined: {blocks}, stages {config.up_stages} and {config.down_stages}")
        )
        columns = f"{config.consumers * CONSUMER_ROWS} × {config.block_columns}"
        rows.append(("weight-gradient tiles", f"pipelined: {columns} of a matrix, stages {config.stages}"))
        rows.append(("splits", f"{plan.stored_splits} token ranges of the weight gradients, in 1 launch(es)"))
    elif plan.weight_gradient_tiles is not None:
        passes = (plan.weight_gradient_tiles.pipelined or plan.weight_gradient_tiles).passes
        rows.append(("splits", f"{plan.splits} token ranges of the weight gradients, in {passes} launch(es)"))
    if plan.chunk_rows:
        rows.append(("chunks", f"{plan.chunk_rows} tokens at a time"))
    rows.append(("GEMM units", f"{plan.forward_units:g} forward, {plan.backward_units:g} backward"))
    return [*rows, *_costs(plan, p.training)]


def _weight_gradient_facts(
    problem: WeightGradientProblem, plan: WeightGradientPlan, device: Device
) -> list[tuple[str, str]]:
    p = problem
    rows = [
        ("problem", f"M={p.M} (rows) O={p.O} K={p.K}, {p.dtype}"),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]
    if plan.pipeline is not None:
        units, columns = plan.pipeline.tile
        size = f"{units} × {columns} of dW, {plan.pipeline.rows} rows in each of {plan.pipeline.stages} stages"
        rows.append(("tiles", f"pipelined: {size}, consumers {plan.pipeline.consumers}"))
    elif plan.tiles is not None:
        t = plan.tiles
        size = f"{t.block_o} × {t.block_k} of dW, {t.block_m} rows at a time"
        rows.append(("tiles", f"{size}, {t.num_warps} warps, {t.num_stages} stages"))
    if plan.path == "fused":
        rows.append(("splits", f"{plan.splits} row ranges"))
    return [*rows, *_costs(plan, p.training)]


def _hidden_gradient_facts(
    problem: HiddenGradientProblem, plan: HiddenGradientPlan, device: Device
) -> list[tuple[str, str]]:
    p = problem
    rows = [
        ("problem", f"M={p.M} (rows) N={p.N} (d_ff) O={p.O}, {p.dtype}"),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]
    if plan.tiles is not None:
        t = plan.tiles
        size = f"{plan.row_tiles} × {t.block_m} rows × {t.block_n} columns of dZ, {t.block_o} columns of dy at a time"
        rows.append(("tiles", f"{size}, {t.num_warps} warps, {t.num_stages} stages"))
    return [*rows, *_costs(plan, p.training)]


_FACTS: dict[type, Callable[..., list[tuple[str, str]]]] = {
    WeightGradientProblem: _weight_gradient_facts,
    HiddenGradientProblem: _hidden_gradient_facts,
}


def _costs(plan: Decision, training: bool) -> list[tuple[str, str]]:
    """What every plan knows of its costs."""
    return [
        ("FLOPs", f"{plan.flops:,}"),
        ("bytes moved", f"at least {plan.bytes:,}"),
        ("saved bytes", f"{plan.saved_bytes:,} for the backward pass" if training else "0 (no gradient is wanted)"),
        ("workspace", f"{plan.workspace_bytes:,} bytes"),
        ("floor", "unknown peak rates" if plan.floor_seconds is None else f"{plan.floor_seconds * 1e6:.1f} µs"),
    ]
