"""Which path a GEMM-GEMM or an FFN takes, with which tiles and splits, and why.

Costs are counted in GEMM units of ``2 M K N`` floating-point operations (for ``O = K``), and in bytes that must move
through device memory.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import CONSUMER_ROWS, StoredConfig, TileConfig, hidden_stride, padded_width
from . import ffn_chunked, ffn_epilogue, reassociating
from .call import NO_OTHER_PATH, SET_TO_TORCH, Call, Decision, Facts, Yields, not_measured, sm90_text, tiles_text
from .choosing import Choice, choose
from .costs import gemm_units, kept_by_torch, saved_bytes
from .devices import Device
from .ffn_chunked import ChunkPlan
from .ffn_epilogue import EpiloguePlan
from .gemm_gemm_tiles import (
    all_on_sm90,
    choose_splits,
    choose_stored_splits,
    chosen_tiles,
    generic_tiles,
    stored_tiles,
)
from .record import TORCH

# Why a path is not taken with recompute=True.
_FORBIDDEN = "recompute=True forbids keeping the hidden"


@dataclass(frozen=True)
class Problem(Call):
    """One call: ``y = act(x W_upᵀ) W_downᵀ`` per batch entry, and which gradients will be asked for.

    ``needs_data_gradient`` speaks of x, ``needs_weight_gradient`` of anything that the weight-gradient kernel yields.
    ``saved_limit`` is the most bytes that may be kept for the backward pass, None for any number.
    """

    operation: str  # "ffn" (weights shared by the batch) or "gemm_gemm" (weights of each batch entry)
    batch: int
    M: int
    K: int
    N: int
    O: int
    dtype: str
    activation: str = "identity"
    gated: bool = False
    dropout: bool = False
    needs_data_gradient: bool = False
    needs_weight_gradient: bool = False
    needs_bias_gradient: bool = False  # of the up or the gate projection
    compiled: bool = False  # by torch.compile, whose calls cost the host less than launches one by one
    recompute: bool | str = "auto"
    saved_limit: int | None = None
    shared_hidden: bool = False  # whether several entries of C multiply one A B
    generic: str = ""  # the name of an operand of a wide FFN that only generic kernels can read, if there is one

    family: ClassVar[str] = "gemm_gemm"  # an FFN and a batched GEMM-GEMM are the same kernels

    __hash__ = Call.__hash__

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, self.M, self.K, self.N, self.O)

    @property
    def training(self) -> bool:
        return self.needs_data_gradient or self.needs_weight_gradient

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the fused path that the problem needs."""
        data_gradient = ("data_gradient",) if self.needs_data_gradient else ()
        weight_gradient = ("weight_gradient",) if self.needs_weight_gradient else ()
        return ("forward", *data_gradient, *weight_gradient)

    @property
    def weight_elements(self) -> int:
        matrices = (2 * self.K if self.gated else self.K) + self.O
        return matrices * self.N * (self.batch if self.operation == "gemm_gemm" else 1)

    @property
    def model_flops(self) -> tuple[int, int]:
        units = gemm_units(self, "torch")
        forward, backward = (round(2 * self.batch * self.M * self.K * self.N * each) for each in units)
        return forward, backward

    @property
    def hidden_bytes(self) -> int:
        return self.batch * self.M * self.N * self.element_bytes

    @property
    def partial_bytes(self) -> int:
        """Float32 weight and bias gradients of one split."""
        return 4 * (self.weight_elements + 2 * self.N * self.batch)

    @property
    def kin(self) -> str:
        return f"{self.operation}{' gated' if self.gated else ''}{' training' if self.training else ''}"

    def recorded(self, path: str, device: Device) -> str:
        if path != "fused":
            return path
        if not all_on_sm90(self, device):
            return "generic"
        everything = self.needs_data_gradient and self.needs_weight_gradient
        return "recomputed" if everything and stored_tiles(self, device) is None else path

    @property
    def variant(self) -> str:
        return self.activation

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.operation == "gemm_gemm":
            return self.batch, self.M, self.K, self.N, self.O
        return self.M, self.K, self.N

    @property
    def described(self) -> str:
        if self.operation == "gemm_gemm":
            sizes = f"B={self.batch} M={self.M} K={self.K} N={self.N} O={self.O}"
        else:
            sizes = f"M={self.M} (tokens) K={self.K} (d_model) N={self.N} (d_ff) O={self.O}"
        return f"{sizes}, {self.dtype}, {self.passes}"

    @property
    def tokens(self) -> int:
        return self.M if self.operation == "ffn" else 0

    @property
    def read_by_torch(self) -> tuple[bool, bool]:
        """Whether its backward pass reads x and the hidden again, for the gradients of what multiplies them."""
        return self.needs_weight_gradient, self.needs_weight_gradient

    def kept_by_torch(self, device: Device) -> int:
        return kept_by_torch(self, device)

    def plan(self, device: Device, backend: str) -> "Plan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class Plan(Decision):
    """The path is "fused", "epilogue", "chunked", "reassociated" or "torch".

    With ``epilogue``, its kernels compute the chunks, too.
    """

    yields: ClassVar[Yields] = {
        **dict.fromkeys(("forward_tiles", "epilogue hidden_tiles", "epilogue hidden_pipeline"), ("y",)),
        "epilogue data_gradient_pipeline": ("dx",),
        "data_gradient_tiles": ("dx", "da", "db_down"),
    }

    forward_tiles: Any = None  # TileConfig of each kernel that will run, else None
    data_gradient_tiles: Any = None
    weight_gradient_tiles: Any = None
    epilogue: EpiloguePlan | None = None
    stored: Any = None  # StoredConfig, if the backward pass stores what is hidden while it runs
    splits: int = 1
    stored_splits: int = 1
    chunks: ChunkPlan | None = None
    accuracy: str = "exact"  # of activations in kernels: one of kernels.activations.ACCURACIES
    forward_units: float = 0.0
    backward_units: float = 0.0

    def kernel_facts(self) -> Facts:
        rows: Facts = []
        if self.forward_tiles is not None:
            rows.append(("forward tiles", _fused_text(self.forward_tiles)))
        if self.stored is not None:
            rows += _stored_facts(self.stored, self.stored_splits)
        if self.stored is None and self.data_gradient_tiles is not None:
            rows.append(("data-gradient tiles", _fused_text(self.data_gradient_tiles)))
        if self.stored is None and self.weight_gradient_tiles is not None:
            passes = _passes(self.weight_gradient_tiles)
            rows += [
                ("weight-gradient tiles", _fused_text(self.weight_gradient_tiles, ("hidden units", "rows"))),
                ("splits", f"{self.splits} token ranges of the weight gradients, in {passes} launch(es)"),
            ]
        if self.epilogue is not None:
            rows += self.epilogue.facts()
        if (chunks := self.chunks) is not None:
            backward = f"; backward {chunks.columns} hidden units at a time" if chunks.columns else ""
            rows.append(("chunks", f"{chunks.rows} tokens at a time{backward}"))
        units = f"{self.forward_units:g} forward, {self.backward_units:g} backward"
        return [*rows, ("GEMM units", f"{units}; a unit is one matrix product of M × K × N")]

    def gain(self, device: Device) -> str:
        # What is not computed is worth more than what is not kept.
        return self.reason if self.path == "reassociated" else super().gain(device)

    def runs(self) -> str:
        if self.chunks is None:
            return super().runs()
        return f"in chunks, {'through torch' if self.epilogue is None else 'in the epilogue kernels'}"

    def why_torch(self, device: Device) -> str:
        # Some kernels hold the width on chip, others are for wider layers: the reason of those that it is for.
        narrow = why_unsupported(self.problem, device) is None
        reason = dict(self.rejected).get("fused" if narrow else "epilogue")
        return super().why_torch(device) if self.unsupported or self.timed or reason is None else reason


def plan(problem: Problem, device: Device, backend: str = "auto") -> Plan:
    """The path that runs ``problem`` on ``device``.

    ``recompute=True`` excludes every path that keeps the hidden. With a limit of saved bytes the path that is chosen
    without it runs if it keeps no more, else what ``recompute=True`` takes.
    """
    if problem.saved_limit is None:
        return _plan(problem, device, backend)
    fastest = _plan(problem, device, backend)
    if fastest.saved_bytes <= problem.saved_limit:
        return fastest
    made = _plan(replace(problem, recompute=True), device, backend)
    kept = f"the {fastest.path} path would save {fastest.saved_bytes:,} bytes of {problem.saved_limit:,} allowed"
    return replace(made, problem=problem, reason=f"{made.reason}; {kept}")


def _plan(problem: Problem, device: Device, backend: str) -> Plan:
    not_fused = why_unsupported(problem, device)
    if problem.operation == "gemm_gemm":
        cannot = {"fused": not_fused, "reassociated": reassociating.why_not(problem, device, backend)}
        choice = choose(problem, device, backend, cannot)
        if not choice.timed and choice.path == TORCH and cannot["reassociated"] is None:
            # No time is known of either, and both are products of torch's.
            choice = reassociating.choose(problem, device, choice)
        return plan_on(problem, device, choice, not_fused)
    # The kernels of the epilogue path hold an FFN of any width, whole or in chunks.
    unsupported = problem.why_no_kernels(device)
    if problem.recompute is True:
        # Chunks keep no pre-activations, so that the same kernels may compute them. Where these were measured, torch's
        # operations took longer in chunks at every width.
        refused = SET_TO_TORCH if backend == "torch" else None
        if refused is None and backend == "auto" and unsupported is None:
            refused = not_measured(problem, device)
        path, against = "chunked", {"fused": not_fused or refused, TORCH: _FORBIDDEN, "epilogue": _FORBIDDEN}
        if against["fused"] is None:
            path, against = "fused", dict.fromkeys(("epilogue", TORCH), _FORBIDDEN)
        elif problem.subclass or problem.empty:
            path = TORCH
        choice = Choice(path, {each: reason for each, reason in against.items() if each != path and reason is not None})
        return plan_on(problem, device, choice, unsupported, chunk_kernels=unsupported is None and refused is None)
    not_epilogue = unsupported or (ffn_epilogue.why_generic(problem, device) if backend == "auto" else None)
    cannot = {"fused": not_fused, "epilogue": not_epilogue}
    choice = choose(problem, device, backend, cannot, lambda path: saved_bytes(problem, path, device))
    return plan_on(problem, device, choice, unsupported)


def why_unsupported(problem: Problem, device: Device) -> str | None:
    """Why the fused kernels cannot run this problem, or None."""
    if (reason := problem.why_no_kernels(device)) is not None:
        return reason
    width = max(problem.K, problem.O)
    for kernel in problem.kernels:
        if generic_tiles(kernel, problem, device) is None:
            return f"width {width} (padded {padded_width(width)}) of {problem.dtype} does not fit on chip in {kernel}"
    return None


def plan_on(
    problem: Problem, device: Device, choice: Choice, unsupported: str | None = None, chunk_kernels: bool = False
) -> Plan:
    """The plan on the path that was chosen, which can run ``problem``.

    ``chunk_kernels``: kernels compute the chunks.
    """
    p, path = problem, choice.path
    options: dict[str, Any] = {}
    if path == "fused":
        options = _fused(p, device)
    elif path == "epilogue":
        options = _epilogue(p, device)
    elif path == "chunked":
        options = _chunked(p, device, chunk_kernels)
    elif path == "reassociated":
        options = {"workspace_bytes": p.element_bytes * p.batch * p.K * p.O}
    tiles = options.get("weight_gradient_tiles")
    units = gemm_units(p, path, 1 if tiles is None else _passes(tiles), options.get("stored") is not None)
    rows = p.batch * p.M
    moved = (rows * (p.K + p.O) + p.weight_elements) * (2 if p.training else 1)
    moved += rows * p.K * p.needs_data_gradient + p.weight_elements * p.needs_weight_gradient
    reason = {
        "fused": "the kernels keep no hidden",
        "epilogue": "activations and bias gradients are computed with the products, and only pre-activations are kept"
        if p.training
        else "activations are computed with the products",
        "reassociated": reassociating.REASON,
        "chunked": f"{_FORBIDDEN}, which no kernel here holds on chip",
        TORCH: NO_OTHER_PATH,
    }[path]
    return Plan.of(
        p, device, choice, reason=reason, flops=int(2 * rows * p.K * p.N * sum(units)), bytes=p.element_bytes * moved,
        saved_bytes=saved_bytes(p, path, device), unsupported=unsupported, forward_units=units[0],
        backward_units=units[1], **options,
    )  # fmt: skip


def _passes(tiles: TileConfig) -> int:
    """The launches that share out the weight gradients."""
    return (tiles.sm90 or tiles).passes


def _fused(problem: Problem, device: Device) -> dict[str, Any]:
    """Tiles, splits and workspace of the fused kernels."""
    options: dict[str, Any] = {f"{kernel}_tiles": chosen_tiles(kernel, problem, device) for kernel in problem.kernels}
    options["accuracy"] = problem.activation_accuracy(device)
    splits, workspace = 1, 0
    if problem.needs_weight_gradient:
        options["splits"] = splits = choose_splits(problem, device, options["weight_gradient_tiles"])
    if (stored := stored_tiles(problem, device)) is not None:
        splits = choose_stored_splits(problem, device, stored)
        options |= {"stored": stored, "stored_splits": splits}
        workspace = (3 if problem.gated else 2) * problem.hidden_bytes
    return options | {"workspace_bytes": workspace + (splits * problem.partial_bytes if splits > 1 else 0)}


def _epilogue(problem: Problem, device: Device) -> dict[str, Any]:
    """Tiles and workspace of the epilogue kernels."""
    element, parts = problem.element_bytes, 2 if problem.gated else 1
    epilogue = ffn_epilogue.plan(problem, device, problem.N)
    # Pre-activations that torch computed are replaced by the hidden.
    padded_bytes = element * problem.M * hidden_stride(problem.N, element)
    workspace = padded_bytes if epilogue.hidden_tiles.block_inner else parts * problem.hidden_bytes
    if epilogue.gradient is not None:
        # The hidden for the gradient of w_down, sums over rows, and the gradients of the pre-activations. These take
        # the place of the pre-activations in the last backward pass over a graph that no compiler made.
        own = 0 if ffn_epilogue.in_place(problem, device, epilogue) and not problem.compiled else parts
        workspace = max(workspace, (own + 1) * padded_bytes + epilogue.gradient.workspace_bytes)
    return {"epilogue": epilogue, "accuracy": problem.activation_accuracy(device), "workspace_bytes": workspace}


def _chunked(problem: Problem, device: Device, kernels: bool) -> dict[str, Any]:
    """The chunks and their workspace, and the tiles of the ``kernels`` that compute them."""
    chunks = ffn_chunked.plan(problem, device, kernels)
    options: dict[str, Any] = {"chunks": chunks, "workspace_bytes": chunks.workspace_bytes}
    if kernels:
        epilogue = ffn_epilogue.plan(problem, device, chunks.hidden_columns, summed=True)
        options |= {"epilogue": epilogue, "accuracy": problem.activation_accuracy(device)}
    return options


def _fused_text(tiles: TileConfig, sides: tuple[str, str] = ("rows", "hidden columns")) -> str:
    """The tiles of one fused kernel in words; ``sides`` are those of a consumer's tile."""
    config = tiles.sm90
    if config is None:
        return tiles_text(f"{tiles.block_m} rows × {tiles.block_n} hidden columns", tiles)
    size = f"{CONSUMER_ROWS} {sides[0]} × {config.block} {sides[1]} for each consumer"
    return sm90_text(size, config.consumers, config.stages)


def _stored_facts(config: StoredConfig, splits: int) -> Facts:
    """A backward pass that stores what is hidden."""
    rows = config.consumers * CONSUMER_ROWS
    blocks = f"{rows} rows × {config.block} hidden columns"
    return [
        ("backward", "stores what is hidden, and its gradient, while it runs: fewer products than recomputing"),
        ("hidden-gradient tiles", f"sm90: {blocks}, stages {config.up_stages} and {config.down_stages}"),
        ("weight-gradient tiles", f"sm90: {rows} × {config.block_columns} of a matrix, stages {config.stages}"),
        ("splits", f"{splits} token ranges of the weight gradients, in 1 launch(es)"),
    ]
