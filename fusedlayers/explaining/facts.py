"""A plan as rows of text: what every plan says, and what the plans of each operation say besides."""

from collections.abc import Callable
from typing import Any

from ..kernels.tuning import CONSUMER_ROWS, EpiloguePipeline, EpilogueTiles, ReduceConfig
from ..planning import (
    Call,
    ChunkPlan,
    Decision,
    Device,
    HiddenGradientPlan,
    HiddenGradientProblem,
    LinearPlan,
    LinearProblem,
    MaxSimPlan,
    MaxSimProblem,
    Plan,
    Problem,
    ProductPlan,
    ReducePlan,
    ReduceProblem,
    WeightGradientPlan,
    WeightGradientProblem,
    choices,
)


def facts(problem: Call, plan: Decision, device: Device) -> list[tuple[str, str]]:
    """(what, text) rows of a plan."""
    return _FACTS[type(problem)](problem, plan, device)


def _call(shape: str, plan: Decision, device: Device) -> list[tuple[str, str]]:
    """What every call has: the problem, the device, the path."""
    return [
        ("problem", shape),
        ("device", " ".join(filter(None, (device.name, device.architecture)))),
        ("path", f"{plan.path}: {plan.reason}"),
    ]


def _direction(training: bool) -> str:
    return "forward and backward" if training else "forward"


def _gemm_gemm_facts(problem: Problem, plan: Plan, device: Device) -> list[tuple[str, str]]:
    p = problem
    if p.operation == "gemm_gemm":
        shape = f"B={p.batch} M={p.M} K={p.K} N={p.N} O={p.O}"
    else:
        shape = f"M={p.M} (tokens) K={p.K} (d_model) N={p.N} (d_ff) O={p.O}"
    rows = _call(f"{shape}, {p.dtype}, {_direction(p.training)}", plan, device)
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
    if plan.epilogue is not None:
        rows.append(("hidden tiles", _epilogue_tiles(plan.epilogue.hidden_tiles, plan.epilogue.hidden_pipeline)))
        gradient = plan.epilogue.gradient
        if gradient is not None and gradient.tiles is not None:
            rows.append(("hidden-gradient tiles", _epilogue_tiles(gradient.tiles, gradient.pipeline)))
        if plan.epilogue.data_gradient_tiles is not None:
            tiles, pipeline = plan.epilogue.data_gradient_tiles, plan.epilogue.data_gradient_pipeline
            rows.append(("data-gradient tiles", _epilogue_tiles(tiles, pipeline)))
    if plan.chunks is not None:
        rows.append(("chunks", _chunks(plan.chunks)))
    rows.append(("GEMM units", f"{plan.forward_units:g} forward, {plan.backward_units:g} backward"))
    return [*rows, *_costs(plan, p.training), *_choices(p, plan, device)]


def _choices(problem: Problem, plan: Plan, device: Device) -> list[tuple[str, str]]:
    """What the backward pass could keep, and compute again instead."""
    if problem.operation != "ffn" or not problem.training or problem.empty:
        return []
    rows = []
    for choice in choices(problem, device, plan):
        text = choice.why_not
        if text is None:
            extra = f"{choice.extra_units:g} extra GEMM units"
            text = f"saves {choice.saved_bytes:,} bytes, {extra}, workspace {choice.workspace_bytes:,} bytes"
        # A name with its path where that says more.
        name = choice.name if choice.name == choice.path else f"{choice.name}, {choice.path}"
        rows.append((f"if {name}", text + (" (chosen)" if choice.path == plan.path else "")))
    return rows


def _chunks(chunks: ChunkPlan) -> str:
    passes = [
        f"{each.rows} tokens × {each.columns} hidden units, {each.slice_columns} at a time"
        + ", dx carried in 20 bits" * each.carried
        for each in chunks.passes
    ]
    return f"{chunks.rows} tokens at a time" + (f"; backward {', then '.join(passes)}" if passes else "")


def _gemm_reduce_facts(problem: ReduceProblem, plan: ReducePlan, device: Device) -> list[tuple[str, str]]:
    p = problem
    shape = f"B={p.batch} kept {p.kept} reduced {p.reduced} K={p.K}, {p.dtype}, {_direction(p.training)}"
    rows = _call(shape, plan, device)
    if plan.forward_tiles is not None:
        rows.append(("tiles", _reduce_tiles(plan.forward_tiles, "kept", "reduced")))
        how = "added in any order (atomic=True)" if p.atomic else "combined in a fixed order"
        rows.append(("splits", f"{plan.splits} ranges of the reduced axis, {how}"))
    return [*rows, *_costs(plan, p.training)]


def _reduce_tiles(tiles: ReduceConfig, kept: str, reduced: str) -> str:
    config = tiles.pipelined
    if config is None:
        size = f"{tiles.block_p} {kept} × {tiles.block_r} {reduced} × {tiles.block_k} inner"
        return f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"
    size = f"{config.consumers * CONSUMER_ROWS} {kept} × {config.block} {reduced} × {config.width} inner"
    return f"pipelined: {size}, consumers {config.consumers}, stages {config.stages}"


def _maxsim_facts(problem: MaxSimProblem, plan: MaxSimPlan, device: Device) -> list[tuple[str, str]]:
    p = problem
    shape = f"Q={p.queries} ({p.query_tokens} tokens, {p.query_layout})"
    shape += f" D={p.documents} ({p.document_tokens} tokens, {p.document_layout}) d={p.K}"
    rows = _call(f"{shape}, {p.dtype}, {_direction(p.training)}", plan, device)
    if plan.forward_tiles is not None:
        rows.append(("forward tiles", _reduce_tiles(plan.forward_tiles, "query tokens", "document tokens")))
        rows.append(("splits", f"{plan.splits} ranges of a document's tokens, {plan.chunk} documents at a time"))
    if plan.query_gradient_tiles is not None:
        gather = plan.query_gradient_tiles
        size = f"{gather.block_p} query tokens × {gather.block_k} columns, {gather.num_warps} warps"
        rows.append(("query gradient", f"{size}, {plan.query_gradient_splits} ranges of documents"))
    if plan.document_gradient_tiles is not None:
        one_hot = plan.document_gradient_tiles
        size = f"{one_hot.block_l} document tokens × {one_hot.block_k} columns, {one_hot.num_warps} warps"
        rows.append(("document gradient", f"{size}, {plan.document_gradient_splits} ranges of query tokens"))
    return [*rows, *_costs(plan, p.training)]


def _linear_facts(problem: LinearProblem, plan: LinearPlan, device: Device) -> list[tuple[str, str]]:
    p = problem
    rows = _call(f"M={p.M} (rows) N={p.N} K={p.K}, {p.dtype}, {_direction(p.training)}", plan, device)
    rows.append(("forward", _product_text(plan.forward, p.K, "K", p.atomic)))
    if plan.data_gradient is not None:
        rows.append(("data gradient", _product_text(plan.data_gradient, p.N, "N", p.atomic)))
    if plan.weight_gradient is not None:
        made = plan.weight_gradient
        text = f"{made.splits} ranges of the {p.M} rows" if made.path == "fused" else "torch"
        rows.append(("weight gradient", text))
    return [*rows, *_costs(plan, p.training)]


def _product_text(product: ProductPlan, inner: int, letter: str, atomic: bool) -> str:
    t = product.tiles
    if t is None:
        return "torch"
    size = f"{t.block_m} × {t.block_n} of the result, {t.block_k} of {letter} at a time"
    how = "added in any order" if atomic else "added in a fixed order"
    splits = f"{product.splits} ranges of {letter} = {inner}" + (f", {how}" if product.splits > 1 or atomic else "")
    return f"{splits}; {size}, {t.num_warps} warps, {t.num_stages} stages"


def _weight_gradient_facts(
    problem: WeightGradientProblem, plan: WeightGradientPlan, device: Device
) -> list[tuple[str, str]]:
    p = problem
    rows = _call(f"M={p.M} (rows) O={p.O} K={p.K}, {p.dtype}", plan, device)
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
    rows = _call(f"M={p.M} (rows) N={p.N} (d_ff) O={p.O}, {p.dtype}", plan, device)
    if plan.tiles is not None:
        rows.append(("tiles", _epilogue_tiles(plan.tiles, plan.pipeline)))
    return [*rows, *_costs(plan, p.training)]


def _epilogue_tiles(tiles: EpilogueTiles, pipeline: EpiloguePipeline | None) -> str:
    if pipeline is not None:
        size = f"{2 * CONSUMER_ROWS} × {2 * CONSUMER_ROWS} of the product"
        order = ", each program in one column of them" if pipeline.stays else ""
        return f"pipelined: {size}, {pipeline.step} inner, consumers 2 in turn, stages {pipeline.stages}{order}"
    size = f"{tiles.block_m} × {tiles.block_n} of the product, {tiles.block_inner} inner"
    return f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def _costs(plan: Decision, training: bool) -> list[tuple[str, str]]:
    """What every plan knows of its costs."""
    return [
        ("FLOPs", f"{plan.flops:,}"),
        ("bytes moved", f"at least {plan.bytes:,}"),
        ("saved bytes", f"{plan.saved_bytes:,} for the backward pass" if training else "0 (no gradient is wanted)"),
        ("workspace", f"{plan.workspace_bytes:,} bytes"),
        ("floor", "unknown peak rates" if plan.floor_seconds is None else f"{plan.floor_seconds * 1e6:.1f} µs"),
    ]


_FACTS: dict[type[Call], Callable[[Any, Any, Device], list[tuple[str, str]]]] = {
    Problem: _gemm_gemm_facts,
    ReduceProblem: _gemm_reduce_facts,
    MaxSimProblem: _maxsim_facts,
    LinearProblem: _linear_facts,
    WeightGradientProblem: _weight_gradient_facts,
    HiddenGradientProblem: _hidden_gradient_facts,
}
