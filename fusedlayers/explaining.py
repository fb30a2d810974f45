"""A plan in words: which path runs, what it costs, what it keeps, and why the other paths were rejected."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import functional
from .devices import describe
from .functional.arguments import check_ffn, check_gemm_gemm, check_maxsim
from .functional.dispatch import dispatch, ffn_problem, gemm_gemm_problem, maxsim_problem
from .functional.reduce_arguments import check_gemm_reduce, gemm_reduce_problem
from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.tuning import CONSUMER_ROWS
from .planning import Decision, Device, Plan, Problem, ReduceProblem


def explain(target: nn.Module | Callable[..., Tensor], *inputs: Tensor, **options: object) -> str:
    """What ``target(*inputs)`` would do on this machine, as text; nothing is computed.

    Args:
        target: a :class:`FusedFFN` or :class:`MaxSim`, a module that :func:`replace` has fused, or a function of
            ``fusedlayers.functional``.
        inputs: the tensors of the call; ``requires_grad`` of inputs and parameters and the grad mode count.
        options: the keyword arguments of the call.

    Returns:
        Lines naming path, reason, tiles, splits, GEMM units, FLOPs, bytes, saved bytes, workspace, the floor time where
        the device's peak rates are known, and each rejected path with its reason.

    Raises:
        TypeError: ``target`` is none of these.
    """
    if target is functional.gemm_gemm:
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
    elif target is functional.maxsim or getattr(target, "function", None) is functional.maxsim:
        return _maxsim(inspect.signature(functional.maxsim).bind(*inputs, **options).arguments)
    elif target is functional.gemm_reduce:
        return _gemm_reduce(inspect.signature(functional.gemm_reduce).bind(*inputs, **options).arguments)
    else:
        known = "a FusedFFN, a MaxSim, a module fused by replace(), or a function of fusedlayers.functional"
        raise TypeError(f"target must be {known}, got {type(target).__name__}")
    device = next(value for value in arguments.values() if isinstance(value, Tensor)).device
    plan = dispatch(problem, device)
    return _told(title, [*_facts(problem, plan, describe(device)), *_copies(problem, plan, arguments)], plan)


def _told(title: str, rows: list[tuple[str, str]], plan: Decision) -> str:
    rows = [*rows, *((f"not {path}", reason) for path, reason in plan.rejected)]
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


def _gemm_reduce(arguments: dict[str, Any]) -> str:
    given = {name: p.default for name, p in inspect.signature(functional.gemm_reduce).parameters.items()} | arguments
    activation = canonical_activation(given.pop("activation"))
    check_gemm_reduce(**given)
    problem = gemm_reduce_problem(**given, activation=activation)
    device = given["a"].device
    plan = dispatch(problem, device)
    axes = ("N", "M") if given["dim"] == -2 else ("M", "N")
    shape = f"B={problem.batch} {axes[0]}={problem.kept} (kept) {axes[1]}={problem.reduced} (reduced) K={problem.K}"
    rows = [*_call(shape, problem, plan, describe(device))]
    if plan.path == "fused":
        tiles = plan.forward_tiles
        size = f"{tiles.block_p} kept × {tiles.block_r} reduced × {tiles.block_k} inner"
        rows.append(("tiles", f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"))
        how = "added in any order (atomic=True)" if problem.atomic else "combined in a fixed order"
        rows.append(("splits", f"{plan.splits} ranges of the reduced axis, {how}"))
    act = "" if activation == "identity" else f", act = {_formula(problem)}"
    inner = "a @ b" if activation == "identity" else "act(a @ b)"
    title = f"gemm_reduce: {given['op']} of {inner} over {axes[1]}{act}"
    return _told(title, [*rows, *_costs(problem, plan)], plan)


def _maxsim(arguments: dict[str, Any]) -> str:
    given: dict[str, Any] = dict.fromkeys(inspect.signature(functional.maxsim).parameters) | arguments
    check_maxsim(**given)
    p = maxsim_problem(**given)
    queries = given["queries"]
    plan = dispatch(p, queries.device)
    shape = f"Q={p.queries} ({p.query_tokens} tokens, {p.query_layout})"
    shape += f" D={p.documents} ({p.document_tokens} tokens, {p.document_layout}) d={p.K}"
    rows = _call(shape, p, plan, describe(queries.device))
    if plan.path == "fused":
        tiles = plan.forward_tiles
        size = f"{tiles.block_p} query tokens × {tiles.block_r} document tokens"
        rows.append(("forward tiles", f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"))
        rows.append(("splits", f"{plan.splits} ranges of a document's tokens, {plan.chunk} documents at a time"))
        if queries.dim() == 3 and not _has_uniform_rows(queries):
            what = f"queries of shape {list(queries.shape)} and strides {list(queries.stride())}"
            rows.append(("copies", f"{what} have no uniform rows: one contiguous copy"))
    if plan.query_gradient_tiles is not None:
        gather = plan.query_gradient_tiles
        size = f"{gather.block_p} query tokens × {gather.block_k} columns, {gather.num_warps} warps"
        rows.append(("query gradient", f"{size}, {plan.query_gradient_splits} ranges of documents"))
    if plan.document_gradient_tiles is not None:
        one_hot = plan.document_gradient_tiles
        size = f"{one_hot.block_l} document tokens × {one_hot.block_k} columns, {one_hot.num_warps} warps"
        rows.append(("document gradient", f"{size}, {plan.document_gradient_splits} ranges of query tokens"))
    title = "maxsim: scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]"
    return _told(title, [*rows, *_costs(p, plan)], plan)


def _has_uniform_rows(x: Tensor) -> bool:
    """Whether a view makes the leading dimensions of x one."""
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return True


def _copies(problem: Problem, plan: Plan, arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """The operands that a kernel cannot reach through strides alone."""
    if plan.path == "torch" or problem.operation != "ffn":
        return []
    x = arguments["x"]
    if not _has_uniform_rows(x):
        text = f"x of shape {list(x.shape)} and strides {list(x.stride())} has no uniform rows: one contiguous copy"
        return [("copies", text)]
    return []


def _formula(problem: Problem | ReduceProblem) -> str:
    return f"{problem.activation}: {ACTIVATIONS[problem.activation].formula}"


def _facts(problem: Problem, plan: Plan, device: Device) -> list[tuple[str, str]]:
    p = problem
    if p.operation == "gemm_gemm":
        shape = f"B={p.batch} M={p.M} K={p.K} N={p.N} O={p.O}"
    else:
        shape = f"M={p.M} (tokens) K={p.K} (d_model) N={p.N} (d_ff) O={p.O}"
    rows = _call(shape, p, plan, device)
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
    return [
        *rows,
        ("GEMM units", f"{plan.forward_units:g} forward, {plan.backward_units:g} backward"),
        *_costs(p, plan),
    ]


def _call(shape: str, p: Any, plan: Decision, device: Device) -> list[tuple[str, str]]:
    """What every call has: the problem, the device, the path."""
    return [
        ("problem", f"{shape}, {p.dtype}, {'forward and backward' if p.training else 'forward'}"),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]


def _costs(p: Any, plan: Decision) -> list[tuple[str, str]]:
    """What every plan costs."""
    return [
        ("FLOPs", f"{plan.flops:,}"),
        ("bytes moved", f"at least {plan.bytes:,}"),
        ("saved bytes", f"{plan.saved_bytes:,} for the backward pass" if p.training else "0 (no gradient is wanted)"),
        ("workspace", f"{plan.workspace_bytes:,} bytes"),
        ("floor", "unknown peak rates" if plan.floor_seconds is None else f"{plan.floor_seconds * 1e6:.1f} µs"),
    ]
