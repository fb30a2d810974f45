"""How experts run: torch's grouped products or kernels over rows sorted by expert, and why."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import EpiloguePipeline
from ..kernels.tuning.dtypes import GENERIC
from ..kernels.tuning.grouped_gemm import GroupedTiles, grouped_tiles, padded_rows, row_block
from ..kernels.tuning.grouped_gemm_pipelines import BLOCK, GROUPED_PIPELINES, CooperativePipeline, GroupedPipeline
from .call import Call, Decision, Facts, Yields, sm90_text, tiles_text
from .choosing import choose
from .costs import hidden_copies
from .devices import Device
from .record import TORCH

# Rows have 32-bit numbers.
MOST_ROWS = 2**31 - 2**16


@dataclass(frozen=True)
class MoeProblem(Call):
    """One call for x ``[M, K]`` and E experts with N hidden units, of which every token has ``top_k``."""

    M: int
    K: int
    N: int
    E: int
    top_k: int
    dtype: str
    activation: str = "silu"
    gated: bool = False
    biased: bool = False
    clamped: bool = False
    recompute: bool = False
    training: bool = False
    frozen: bool = False  # whether no gradient of an expert's weight is wanted
    operation: str = "moe_ffn"

    __hash__ = Call.__hash__

    @property
    def slots(self) -> int:
        """Rows of all experts together."""
        return self.M * self.top_k

    @property
    def block(self) -> int:
        """Every expert's rows begin at a multiple of this."""
        return row_block(self.slots, self.E, self.training)

    @property
    def capacity(self) -> int:
        """The most rows there are with padding, whatever the routing."""
        return padded_rows(self.slots, self.E, self.block)

    @property
    def products(self) -> int:
        """Products of the forward pass, all of one size."""
        return 3 if self.gated else 2

    @property
    def model_flops(self) -> tuple[int, int]:
        forward = 2 * self.slots * self.K * self.N * self.products
        return forward, 2 * forward * self.training

    @property
    def tokens(self) -> int:
        return self.M

    @property
    def kin(self) -> str:
        return "moe_ffn training" if self.training else "moe_ffn"

    @property
    def variant(self) -> str:
        return "gated" if self.gated else ""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.M, self.K, self.N, self.E, self.top_k

    @property
    def described(self) -> str:
        sizes = f"M={self.M} (tokens) K={self.K} N={self.N} E={self.E} (experts) k={self.top_k}"
        return f"{sizes}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "MoePlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class MoePlan(Decision):
    """The path is "epilogue" or "torch"."""

    yields: ClassVar[Yields] = {
        f"{step}_{kind}": results
        for kind in ("tiles", "pipeline")
        for step, results in (
            ("hidden", ("y",)),
            ("product", ("y", "dx")),
            ("hidden_gradient", ("dx", "dtop_k_weights", "db_up", "db_gate")),
            ("weight_gradient", ("dw_up", "dw_gate", "dw_down")),
        )
    }

    hidden_tiles: GroupedTiles | None = None
    product_tiles: GroupedTiles | None = None
    hidden_gradient_tiles: GroupedTiles | None = None
    weight_gradient_tiles: GroupedTiles | None = None
    # What runs instead, where the operands lie as its copies need them.
    hidden_pipeline: EpiloguePipeline | None = None
    product_pipeline: CooperativePipeline | None = None
    hidden_gradient_pipeline: EpiloguePipeline | None = None
    weight_gradient_pipeline: CooperativePipeline | None = None
    accuracy: str = "exact"  # of activations: one of kernels.activations.ACCURACIES

    def kernel_facts(self) -> Facts:
        if self.path == "torch":
            return []
        p = self.problem
        sorted_rows = f"{p.slots:,} sorted by expert on the device, each expert's padded to a multiple of {p.block}"
        found = [("rows", sorted_rows)]
        for step in ("hidden", "product", "hidden_gradient", "weight_gradient"):
            name = step.replace("_", " ")
            tiles: GroupedTiles | None = getattr(self, f"{step}_tiles")
            pipeline: GroupedPipeline | None = getattr(self, f"{step}_pipeline")
            if pipeline is not None:
                size = f"{pipeline.tile[0]} × {pipeline.tile[1]}, {pipeline.step} inner"
                found.append((name, sm90_text(size, 2, pipeline.stages)))
            elif tiles is not None:
                size = f"{tiles.block_m} × {tiles.block_n}, {tiles.block_inner} inner"
                found.append((name, tiles_text(size, tiles)))
        return found


def plan(problem: MoeProblem, device: Device, backend: str = "auto") -> MoePlan:
    """The path that runs ``problem`` on ``device``."""
    p, unsupported = problem, why_unsupported(problem, device)
    choice = choose(problem, device, backend, {"epilogue": unsupported})
    flops = sum(p.model_flops)
    weights = p.E * p.K * p.N * p.products
    moved = p.element_bytes * (2 * p.M * p.K + weights) * (2 if p.training else 1)
    options: dict[str, Any] = {}
    if choice.path != TORCH:
        options = {
            **tiles(problem, device),
            "accuracy": problem.activation_accuracy(device),
            "workspace_bytes": workspace_bytes(problem),
        }
        if p.recompute and p.training:
            flops += 2 * p.slots * p.K * p.N * (p.products - 1)
    return MoePlan.of(
        problem, device, choice,
        reason="gate and activation are computed in the epilogue of the first product",
        flops=flops, bytes=moved,
        saved_bytes=saved_bytes(problem, choice.path != TORCH), unsupported=unsupported, **options,
    )  # fmt: skip


def why_unsupported(problem: MoeProblem, device: Device) -> str | None:
    """Why the kernels cannot run ``problem``, or None."""
    if (reason := problem.why_no_kernels(device)) is not None:
        return reason
    return why_too_many_rows(problem)


def why_too_many_rows(problem: MoeProblem) -> str | None:
    """Why kernels cannot number the rows, or None."""
    if problem.capacity <= MOST_ROWS:
        return None
    return f"{problem.capacity:,} rows are more than have a 32-bit number"


def tiles(problem: MoeProblem, device: Device) -> dict[str, GroupedTiles | GroupedPipeline]:
    """The tiles of every step that runs, and those of the sm90 kernels."""
    steps = {"hidden": "wide" if problem.gated else "product", "product": "product"}
    if problem.training:
        steps |= {"hidden_gradient": "wide" if problem.gated else "product", "weight_gradient": "weight_gradient"}
    bits = problem.format.bits
    found: dict[str, GroupedTiles | GroupedPipeline] = {
        f"{name}_tiles": grouped_tiles(device.architecture, bits, step, problem.block) for name, step in steps.items()
    }
    if device.backend_for(problem.dtype) != GENERIC and problem.block == BLOCK:
        found |= {
            f"{name}_pipeline": replace(GROUPED_PIPELINES[name, problem.gated], programs=device.sms) for name in steps
        }
    return found


def workspace_bytes(problem: MoeProblem) -> int:
    """The most temporary memory of a pass, the results aside: rows of x, hidden and y, or the like of gradients.

    The gradients of pre-activations take the place of these, in the last backward pass over a graph that no compiler
    made.
    """
    p = problem
    forward = p.K + p.N * (1 if p.training and not p.recompute else 1 + p.gated * p.training)
    backward = (p.K + p.N * (1 + (1 + p.gated) * p.recompute)) * p.training
    return p.element_bytes * p.capacity * max(forward, backward)


def saved_bytes(problem: MoeProblem, kernels: bool) -> int:
    """What is kept for the backward pass beside the weights."""
    p = problem
    if not p.training:
        return 0
    if not kernels:
        # The rows of x, what is hidden with what a limit was applied to, the experts' results and their weights; and
        # the order of the rows three times, in 64 bits, with which of them have an expert.
        hidden = hidden_copies(p, not p.frozen) + 2 * p.clamped
        return p.slots * (p.element_bytes * (p.K * (2 - p.frozen) + p.N * hidden + 1) + 25)
    # The routing as it was given, and the rows sorted by it.
    routing = (8 + p.element_bytes) * p.slots + 4 * (p.capacity + p.slots + p.capacity // p.block + p.E + 1)
    kept = 0 if p.recompute else p.capacity * p.N * (2 if p.gated else 1)
    return p.element_bytes * (p.M * p.K + kept) + routing
