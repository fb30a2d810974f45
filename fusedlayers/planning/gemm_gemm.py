"""Which path a GEMM-GEMM or an FFN takes, with which tiles and splits, and why.

Costs are counted in GEMM units of ``2 M K N`` floating-point operations (for ``O = K``), and in bytes that must move
through device memory.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import CONSUMER_ROWS, hidden_stride, padded_width, sm90_width, stored_config
from . import ffn_chunked, ffn_epilogue, gemm_gemm_facts, reassociating
from .call import (
    NO_OTHER_PATH,
    VECTOR,
    Call,
    Decision,
    Facts,
    Yields,
    activation_accuracy,
    no_kernels,
    too_small,
    why_not_kernels,
)
from .costs import gemm_units, kept_by_torch, saved_bytes
from .devices import Device, floor_seconds
from .ffn_chunked import ChunkPlan
from .ffn_epilogue import EpiloguePlan
from .gemm_gemm_splits import choose_splits, choose_stored_splits
from .gemm_gemm_tiles import all_on_sm90, chosen_tiles, generic_tiles, stored_tiles
from .measured import GemmGemm

# Rows of the kernels' largest tiles.
ROW_TILE = 2 * CONSUMER_ROWS


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
    def waits_for_host(self) -> bool:
        """Whether fewer launches are worth more than a faster device: a forward pass, launched one by one."""
        return not (self.training or self.captured or self.compiled)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the fused path that the problem needs."""
        needed = (True, self.needs_data_gradient, self.needs_weight_gradient)
        names = ("forward", "data_gradient", "weight_gradient")
        return tuple(name for name, need in zip(names, needed, strict=True) if need)

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
    def described(self) -> str:
        return gemm_gemm_facts.described(self)

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
        return gemm_gemm_facts.kernel_facts(self)

    def gain(self, device: Device) -> str:
        # What is not computed is worth more than what is not kept.
        return self.reason if self.path == "reassociated" else super().gain(device)

    def runs(self) -> str:
        return super().runs() if self.chunks is None else gemm_gemm_facts.chunks_run(self)

    def why_torch(self, device: Device) -> str:
        # Some kernels hold the width on chip, others are for wider layers: the reason of those that it is for.
        narrow = why_unsupported(self.problem, device) is None
        reason = dict(self.rejected).get("fused" if narrow else "epilogue")
        return super().why_torch(device) if self.unsupported or reason is None else reason


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
    figures = device.figures
    reasons = {"fused": why_not_kernels(problem, device, backend, not_fused, figures.gemm_gemm, why_slower)}
    # The kernels of the epilogue path hold an FFN of any width, whole or in chunks.
    unsupported = not_fused if problem.operation == "gemm_gemm" else no_kernels(problem, device)
    chunk_kernels = False
    if problem.operation == "gemm_gemm":
        reasons["chunked"] = "a batched GEMM-GEMM is not cut into chunks"
    elif reasons["fused"] is None:
        reasons |= dict.fromkeys(("epilogue", "chunked"))
    else:
        not_epilogue = ffn_epilogue.why_unsupported(problem, device)
        slower = ffn_epilogue.why_slower
        reasons["epilogue"] = why_not_kernels(problem, device, backend, not_epilogue, figures.epilogue, slower)
        if problem.recompute is True:
            # Chunks keep no pre-activations, so that the same kernels may compute them. Where these were measured,
            # torch's operations took longer in chunks at every width.
            not_chunks = why_not_kernels(problem, device, backend, unsupported, figures.epilogue, lambda *_: None)
            chunk_kernels = not_chunks is None
        reasons["chunked"] = None if problem.recompute is True else "only recompute=True needs its memory guarantee"
        if problem.subclass:
            reasons["chunked"] = f"an operand is a {problem.subclass}: parts of it cannot be written one by one"
        if problem.empty:
            reasons["chunked"] = "there is nothing to compute"
    path = next((name for name, reason in reasons.items() if reason is None), "torch")
    for name in reasons:
        if reasons[name] is None and name != path:
            kept = "pre-activations" if name == "epilogue" else "hidden either"
            reasons[name] = f"the fused path keeps no {kept}, and is one kernel"
    if problem.operation == "gemm_gemm":
        reasons["reassociated"] = reassociating.why_not(problem, device, backend, path)
        if reasons["reassociated"] is None:
            better = reassociating.why_better(problem, device, path)
            path, reasons = "reassociated", reasons | {path: better, "torch": better}
    rejected = [(name, reason) for name, reason in reasons.items() if reason is not None]
    if path != "torch" and "torch" not in reasons:
        better = "recompute=True forbids keeping the hidden" if path == "chunked" else "the kernels cover the problem"
        rejected.append(("torch", better))
    return plan_on(problem, device, path, tuple(rejected), unsupported, chunk_kernels)


def why_unsupported(problem: Problem, device: Device) -> str | None:
    """Why the fused kernels cannot run this problem, or None."""
    if (reason := no_kernels(problem, device)) is not None:
        return reason
    width = max(problem.K, problem.O)
    for kernel in problem.kernels:
        if generic_tiles(kernel, problem, device) is None:
            return f"width {width} (padded {padded_width(width)}) of {problem.dtype} does not fit on chip in {kernel}"
    return None


def why_slower(problem: Problem, device: Device, figures: GemmGemm) -> str | None:
    """Why torch is expected to be faster, from measurements, or None."""
    if problem.recompute is True:
        return None  # the alternative is to recompute in chunks, many launches for each
    batched = problem.operation == "gemm_gemm"
    kind = problem.operation if batched else "gated ffn" if problem.gated else "ffn"
    sm90 = all_on_sm90(problem, device)
    width = (sm90_width if sm90 else padded_width)(max(problem.K, problem.O))
    tiles = problem.batch * -(-problem.M // ROW_TILE)
    if batched and tiles < device.sms * figures.least_tiles[0 if sm90 else 1 + (problem.N % VECTOR > 0)]:
        return f"{tiles} tiles of {ROW_TILE} rows leave SMs idle: torch was as fast or faster"
    even = padded_width(problem.O) == problem.O or (batched and not problem.training and problem.O % VECTOR == 0)
    if not (sm90 or even):
        return f"width {problem.O} is padded to {padded_width(problem.O)}: torch was as fast or faster"
    if batched and not sm90 and tiles < 2 * device.sms and figures.most_padding < (more := _padding(problem)):
        return f"tiles are {more:.1f} times as large as what they hold: torch was as fast or faster"
    one_launch = sm90 and not batched and problem.waits_for_host
    if one_launch and width * problem.N <= figures.weights_of_one_launch[problem.gated]:
        return None
    if sm90 and not batched and _fills_too_few(tiles, width, problem, device, figures):
        return f"{problem.M:,} rows keep too few SMs busy: the path for wider layers divides hidden units, too"
    ends_within_tile = False
    if sm90 and width > 128 and problem.needs_data_gradient and problem.needs_weight_gradient:
        # Such a pass was measured faster than torch's only where it stores what is hidden.
        stored = stored_config(problem.gated, problem.K, problem.N, problem.O, device.sms, device.triton_release)
        sm90 = stored is not None
        ends_within_tile = stored is not None and problem.N % stored.block > 0
    rows = (figures.sm90_faster_from if sm90 else figures.faster_from)[kind, problem.training]
    if sm90 and problem.training and not (problem.captured or problem.compiled):
        rows = (*figures.trained_from.get(kind, ()), *rows)
    thresholds = next((limits for largest, limits in rows if width <= largest), None)
    if thresholds is None:
        use = "training" if problem.training else "inference"
        return f"in {use} torch was as fast or faster at width {width}"
    units = problem.N if batched else min(problem.N, 4 * width)
    elements = problem.batch * problem.M * units
    if sm90 and units < problem.N and figures.busy_rows > problem.M:
        elements = elements * units // problem.N  # each tile takes longer, while other SMs are idle
    reason = too_small(elements, "hidden elements", thresholds, problem.captured)
    many = problem.gated and problem.training and (units < problem.N or ends_within_tile)
    if reason is None and many and width > figures.widest_of_many:
        return f"{problem.N:,} hidden units at width {width}: the path for wider layers was faster"
    return reason


def _padding(problem: Problem) -> float:
    """How many times as large the generic kernel's tiles of x and y are as what they hold."""
    rows = -(-problem.M // ROW_TILE) * ROW_TILE / problem.M
    return rows * (padded_width(problem.K) + padded_width(problem.O)) / (problem.K + problem.O)


def _fills_too_few(tiles: int, width: int, problem: Problem, device: Device, figures: GemmGemm) -> bool:
    """Whether ``tiles`` of rows fill so few SMs that the path for wider layers was faster, or torch in its place."""
    _, share, units = next(row for row in figures.least_filled[problem.gated] if width <= row[0])
    many = units < problem.N or (width > 64 and problem.gated and problem.training)
    if not many or tiles >= share * device.sms:
        return False
    if problem.captured:
        return True  # such calls that are too small for that path were faster in torch, too
    epilogue = device.figures.epilogue
    return epilogue is not None and ffn_epilogue.why_slower(problem, device, epilogue) is None


def plan_on(
    problem: Problem,
    device: Device,
    path: str,
    rejected: tuple[tuple[str, str], ...] = (),
    unsupported: str | None = None,
    chunk_kernels: bool = False,
) -> Plan:
    """The plan on a path that can run ``problem``; ``chunk_kernels``: whether kernels compute the chunks."""
    element = problem.element_bytes
    rows = problem.batch * problem.M
    weight_tiles = None
    if path == "fused" and problem.needs_weight_gradient:
        weight_tiles = chosen_tiles("weight_gradient", problem, device)
    passes = 1 if weight_tiles is None else (weight_tiles.sm90 or weight_tiles).passes
    chunks = ffn_chunked.plan(problem, device, chunk_kernels) if path == "chunked" else None
    stored = stored_tiles(problem, device) if path == "fused" else None
    forward_units, backward_units = gemm_units(problem, path, passes, stored is not None)
    flops = int(2 * rows * problem.K * problem.N * (forward_units + backward_units))
    io_bytes = element * (rows * (problem.K + problem.O) + problem.weight_elements) * (2 if problem.training else 1)
    io_bytes += element * rows * problem.K * problem.needs_data_gradient
    io_bytes += element * problem.weight_elements * problem.needs_weight_gradient
    parts = 2 if problem.gated else 1
    options: dict[str, Any] = {}
    if path == "fused":
        options = {
            "forward_tiles": chosen_tiles("forward", problem, device),
            "accuracy": activation_accuracy(problem, device),
        }
        if problem.needs_data_gradient:
            options["data_gradient_tiles"] = chosen_tiles("data_gradient", problem, device)
        if weight_tiles is not None:
            splits = choose_splits(problem, device, weight_tiles)
            options |= {
                "weight_gradient_tiles": weight_tiles,
                "splits": splits,
                "workspace_bytes": splits * problem.partial_bytes if splits > 1 else 0,
            }
        if stored is not None:
            splits = choose_stored_splits(problem, device, stored)
            hidden_bytes = (parts + 1) * problem.hidden_bytes
            partial_bytes = splits * problem.partial_bytes if splits > 1 else 0
            options |= {
                "stored": stored,
                "stored_splits": splits,
                "workspace_bytes": hidden_bytes + partial_bytes,
            }
    elif path == "epilogue":
        epilogue = ffn_epilogue.plan(problem, device, problem.N)
        # Pre-activations that torch computed are replaced by the hidden.
        padded_bytes = problem.element_bytes * problem.M * hidden_stride(problem.N, problem.element_bytes)
        workspace = padded_bytes if epilogue.hidden_tiles.block_inner else parts * problem.hidden_bytes
        if epilogue.gradient is not None:
            # The hidden for the gradient of w_down, sums over rows, and the gradients of the pre-activations: without a
            # place of their own in the last backward pass over a graph that no compiler made.
            own = 0 if ffn_epilogue.in_place(problem, device, epilogue) and not problem.compiled else parts
            workspace = max(workspace, (own + 1) * padded_bytes + epilogue.gradient.workspace_bytes)
        options = {
            "epilogue": epilogue,
            "accuracy": activation_accuracy(problem, device),
            "workspace_bytes": workspace,
        }
    elif path == "reassociated":
        options = {"workspace_bytes": element * problem.batch * problem.K * problem.O}
    elif chunks is not None:
        options = {"chunks": chunks, "workspace_bytes": chunks.workspace_bytes}
        if chunk_kernels:
            epilogue = ffn_epilogue.plan(problem, device, chunks.hidden_columns, summed=True)
            options |= {"epilogue": epilogue, "accuracy": activation_accuracy(problem, device)}
    reason = {
        "fused": "the kernels keep no hidden",
        "epilogue": "activations and bias gradients are computed with the products, and only pre-activations are kept"
        if problem.training
        else "activations are computed with the products",
        "reassociated": reassociating.REASON,
        "chunked": "recompute=True forbids keeping the hidden, which no kernel here holds on chip",
        "torch": NO_OTHER_PATH,
    }[path]
    return Plan(
        problem=problem,
        path=path,
        reason=reason,
        rejected=rejected,
        forward_units=forward_units,
        backward_units=backward_units,
        flops=flops,
        bytes=io_bytes,
        saved_bytes=saved_bytes(problem, path, device),
        floor_seconds=floor_seconds(flops, io_bytes, problem.dtype, device),
        unsupported=unsupported,
        **options,
    )
