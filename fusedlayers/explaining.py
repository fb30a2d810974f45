"""A plan in words: which path runs, what it costs, what it keeps, and why the other paths were rejected."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import functional
from .devices import describe
from .functional.arguments import check_ffn, check_gemm_gemm, check_maxsim
from .functional.dispatch import dispatch, ffn_problem, gemm_gemm_problem, maxsim_problem
from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.tuning import CONSUMER_ROWS
from .planning import Decision, Device, MaxSimPlan, MaxSimProblem, Plan, Problem


def explain(target: nn.Module | Callable[..., Tensor], *inputs: Tensor, **options: object) -> str:
    """What ``target(*inputs)`` would do on this machine, as text; nothing is computed.

    Args:
        target: a :class:`FusedFFN` or :class:`MaxSim`, a module that :func:`replace` has fused, ``functional.ffn``,
            ``functional.gemm_gemm`` or ``functional.maxsim``.
        inputs: the tensors of the call; ``requires_grad`` of inputs and parameters and the grad mode count.
        options: the keyword arguments of the call.

    Returns:
        Lines naming path, reason, tiles, splits, GEMM units, FLOPs, bytes, saved bytes, workspace, the floor time where
        the device's peak rates are known, and each rejected path with its reason.

    Raises:
        TypeError: ``target`` is none of these.
    """
    problem: Problem | MaxSimProblem
    if target is functional.gemm_gemm:
        arguments = inspect.signature(functional.gemm_gemm).bind(*inputs, **options).arguments
        arguments["activation"] = canonical_activation(arguments.get("activation"))
        check_gemm_gemm(arguments["a"], arguments["b"], arguments["c"])
        problem = gemm_gemm_problem(**arguments)
        title = f"gemm_gemm: act(a @ b) @ c, act = {_formula(problem)}"
    elif target is functional.maxsim or getattr(target, "function", None) is functional.maxsim:
        arguments = inspect.signature(functional.maxsim).bind(*inputs, **options).arguments
        problem, title = _maxsim(arguments), "maxsim: scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]"
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
        known = "a FusedFFN, a MaxSim, a module fused by replace(), or a function of fusedlayers.functional"
        raise TypeError(f"target must be {known}, got {type(target).__name__}")
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    plan = dispatch(problem, device)
    if isinstance(problem, MaxSimProblem):
        rows = [*_maxsim_facts(problem, plan, describe(device)), *_maxsim_copies(plan, arguments)]
    else:
        rows = [*_facts(problem, plan, describe(device)), *_copies(problem, plan, arguments)]
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


def _copies(problem: Problem, plan: Plan, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """The operands that a kernel cannot reach through strides alone."""
    if plan.path == "torch" or problem.operation != "ffn":
        return []
    x = arguments["x"]
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        text = f"x of shape {list(x.shape)} and strides {list(x.stride())} has no uniform rows: one contiguous copy"
        return [("copies", text)]
    return []


def _formula(problem: Problem) -> str:
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
    units = ("GEMM units", f"{plan.forward_units:g} forward, {plan.backward_units:g} backward")
    return [*rows, units, *_costs(plan)]


def _costs(plan: Decision) -> list[tuple[str, str]]:
    training = plan.problem.training
    return [
        ("FLOPs", f"{plan.flops:,}"),
        ("bytes moved", f"at least {plan.bytes:,}"),
        ("saved bytes", f"{plan.saved_bytes:,} for the backward pass" if training else "0 (no gradient is wanted)"),
        ("workspace", f"{plan.workspace_bytes:,} bytes"),
        ("floor", "unknown peak rates" if plan.floor_seconds is None else f"{plan.floor_seconds * 1e6:.1f} µs"),
    ]


def _maxsim(arguments: dict[str, Any]) -> MaxSimProblem:
    given: dict[str, Any] = dict.fromkeys(inspect.signature(functional.maxsim).parameters) | arguments
    check_maxsim(**given)
    return maxsim_problem(**given)


def _maxsim_facts(problem: MaxSimProblem, plan: MaxSimPlan, device: Device) -> list[tuple[str, str]]:
    p = problem
    passes = "forward and backward" if p.training else "forward"
    sides = f"Q={p.queries} ({p.query_tokens} tokens, {p.query_layout})"
    sides += f" D={p.documents} ({p.document_tokens} tokens, {p.document_layout})"
    rows = [
        ("problem", f"{sides} d={p.K}, {p.dtype}, {passes}"),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]
    if plan.forward_tiles is not None:
        tiles = plan.forward_tiles
        size = f"{tiles.block_p} query tokens × {tiles.block_r} document tokens"
        rows.append(("forward tiles", f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"))
        rows.append(("splits", f"{plan.splits} ranges of a document's tokens, {plan.chunk} documents at a time"))
    if plan.query_gradient_tiles is not None:
        gather = plan.query_gradient_tiles
        size = f"{gather.block_p} query tokens × {gather.block_k} columns, {gather.num_warps} warps"
        rows.append(("query gradient", f"{size}, {plan.query_gradient_splits} ranges of documents"))
    if plan.document_gradient_tiles is not None:
        one_hot = plan.document_gradient_tiles
        size = f"{one_hot.block_l} document tokens × {one_hot.block_k} columns, {one_hot.num_warps} warps"
        rows.append(("document gradient", f"{size}, {plan.document_gradient_splits} ranges of query tokens"))
    return [*rows, *_costs(plan)]


def _maxsim_copies(plan: MaxSimPlan, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    queries = arguments["queries"]
    if plan.path == "torch" or queries.dim() == 2:
        return []
    try:
        queries.view(-1, queries.shape[-1])
    except RuntimeError:
        what = f"queries of shape {list(queries.shape)} and strides {list(queries.stride())}"
        return [("copies", f"{what} have no uniform rows: one contiguous copy")]
    return []
