"""Which path a GEMM-GEMM or an FFN takes, with which tiles and splits, and why.

Costs are counted in GEMM units of ``2 M K N`` floating-point operations (for ``O = K``), and in bytes that must move
through device memory.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import hidden_stride, padded_width
from . import ffn_chunked, ffn_epilogue, gemm_gemm_facts, reassociating
from .call import NO_OTHER_PATH, Call, Decision, Facts, Yields, activation_accuracy, no_kernels, not_measured
from .choosing import Choice, choose
from .costs import gemm_units, kept_by_torch, saved_bytes
from .devices import Device, floor_seconds
from .ffn_chunked import ChunkPlan
from .ffn_epilogue import EpiloguePlan
from .gemm_gemm_splits import choose_splits, choose_stored_splits
from .gemm_gemm_tiles import all_on_sm90, chosen_tiles, generic_tiles, stored_tiles
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
        return (
            (self.batch, self.M, self.K, self.N, self.O) if self.operation == "gemm_gemm" else (self.M, self.K, self.N)
        )

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
    unsupported = no_kernels(problem, device)
    if problem.recompute is True:
        # Chunks keep no pre-activations, so that the same kernels may compute them. Where these were measured, torch's
        # operations took longer in chunks at every width.
        refused = "the backend is set to torch" if backend == "torch" else None
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
    if (reason := no_kernels(problem, device)) is not None:
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
    path = choice.path
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
        "chunked": f"{_FORBIDDEN}, which no kernel here holds on chip",
        "torch": NO_OTHER_PATH,
    }[path]
    return Plan(
        problem=problem,
        path=path,
        reason=reason,
        rejected=tuple(choice.against.items()),
        timed=choice.timed,
        forward_units=forward_units,
        backward_units=backward_units,
        flops=flops,
        bytes=io_bytes,
        saved_bytes=saved_bytes(problem, path, device),
        floor_seconds=floor_seconds(flops, io_bytes, problem.dtype, device),
        unsupported=unsupported,
        **options,
    )
