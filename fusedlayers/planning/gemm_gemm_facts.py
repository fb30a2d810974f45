"""What the plan of a GEMM-GEMM or an FFN says of its kernels: tiles, splits, chunks, GEMM units."""

from typing import Any

from ..kernels.tuning import CONSUMER_ROWS, StoredConfig, TileConfig
from .call import Facts, direction
from .ffn_chunked import ChunkPlan
from .ffn_epilogue import EpiloguePlan
from .hidden_gradient import epilogue_text


def kernel_facts(plan: Any) -> Facts:
    """The rows of a ``planning.Plan``."""
    rows = _tiles("forward tiles", plan.forward_tiles)
    if plan.stored is not None:
        rows += _stored(plan.stored, plan.stored_splits)
    else:
        rows += _tiles("data-gradient tiles", plan.data_gradient_tiles)
        rows += _tiles("weight-gradient tiles", plan.weight_gradient_tiles)
        if plan.weight_gradient_tiles is not None:
            passes = (plan.weight_gradient_tiles.sm90 or plan.weight_gradient_tiles).passes
            rows.append(("splits", f"{plan.splits} token ranges of the weight gradients, in {passes} launch(es)"))
    if plan.epilogue is not None:
        rows += _epilogue(plan.epilogue)
    if plan.chunks is not None:
        rows.append(("chunks", _chunks(plan.chunks)))
    units = f"{plan.forward_units:g} forward, {plan.backward_units:g} backward"
    return [*rows, ("GEMM units", f"{units}; a unit is one matrix product of M × K × N")]


def chunks_run(plan: Any) -> str:
    """Where a ``planning.Plan`` runs its chunks."""
    return "in chunks, through torch" if plan.epilogue is None else "in chunks, in the epilogue kernels"


def described(problem: Any) -> str:
    """The sizes of a ``planning.Problem`` by their letters, the dtype and the passes."""
    p = problem
    if p.operation == "gemm_gemm":
        sizes = f"B={p.batch} M={p.M} K={p.K} N={p.N} O={p.O}"
    else:
        sizes = f"M={p.M} (tokens) K={p.K} (d_model) N={p.N} (d_ff) O={p.O}"
    return f"{sizes}, {p.dtype}, {direction(p)}"


def _tiles(name: str, tiles: TileConfig | None) -> Facts:
    """The tiles of one fused kernel, if it runs."""
    if tiles is None:
        return []
    config = tiles.sm90
    if config is None:
        size = f"{tiles.block_m} rows × {tiles.block_n} hidden columns"
        return [(name, f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages")]
    sides = ("hidden units", "rows") if name.startswith("weight") else ("rows", "hidden columns")
    size = f"{CONSUMER_ROWS} {sides[0]} × {config.block} {sides[1]} for each consumer"
    return [(name, f"sm90: {size}, consumers {config.consumers}, stages {config.stages}")]


def _stored(config: StoredConfig, splits: int) -> Facts:
    """A backward pass that stores what is hidden."""
    rows = config.consumers * CONSUMER_ROWS
    blocks = f"{rows} rows × {config.block} hidden columns"
    return [
        ("backward", "stores what is hidden, and its gradient, while it runs: fewer products than recomputing"),
        ("hidden-gradient tiles", f"sm90: {blocks}, stages {config.up_stages} and {config.down_stages}"),
        (
            "weight-gradient tiles",
            f"sm90: {rows} × {config.block_columns} of a matrix, stages {config.stages}",
        ),
        ("splits", f"{splits} token ranges of the weight gradients, in 1 launch(es)"),
    ]


def _epilogue(epilogue: EpiloguePlan) -> Facts:
    rows = [("hidden tiles", epilogue_text(epilogue.hidden_tiles, epilogue.hidden_pipeline))]
    gradient = epilogue.gradient
    if gradient is not None and gradient.tiles is not None:
        rows.append(("hidden-gradient tiles", epilogue_text(gradient.tiles, gradient.pipeline)))
    if epilogue.data_gradient_pipeline is not None:
        rows.append(("data-gradient tiles", epilogue_text(epilogue.hidden_tiles, epilogue.data_gradient_pipeline)))
    return rows


def _chunks(chunks: ChunkPlan) -> str:
    backward = f"; backward {chunks.columns} hidden units at a time" if chunks.columns else ""
    return f"{chunks.rows} tokens at a time{backward}"
