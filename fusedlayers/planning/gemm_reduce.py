"""Which path a GEMM-reduce takes, with which tiles and splits, and why.

A sum or a mean of a product without an activation needs no product of matrices: ``Σ_m (A B) = (Σ_m A) B``. That is the
"algebraic" path, through torch. "fused" are the kernels, "torch" writes the product.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import (
    CONSUMER_ROWS,
    ReduceConfig,
    one_pass_config,
    reduce_config,
    reduce_gradient_config,
    sm90_reduce_config,
)
from ..kernels.tuning.dtypes import GENERIC
from .call import NOT_ON_RECORD, Call, Decision, Facts, Yields, sm90_text, tiles_text
from .choosing import Choice, choose
from .costs import SAVED_FOR_SLOPE, SLOPE_FROM_VALUE
from .devices import PARTIALS_LIMIT, Device, filling_splits
from .measured import fitted
from .record import TORCH

# Programs that run on an SM at once: of the forward kernel, and of small tiles of both gradients.
RESIDENT = 2
# Reductions whose times are those of another one.
_ALIKE = {"min": "max", "absmax": "max", "mean": "sum"}
# Activations that fall before they rise: around their minimum values lie so close together that small errors choose
# which element is the least, and with it where the gradient goes.
_FALLING = ("gelu", "gelu_tanh", "silu", "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What splitting the reduced axis costs: in the forward pass, and of both gradients at once."""

    shortest_split: int  # in tiles; a shorter one spends more on its partials than on its products
    program_blocks: int  # of reduced rows, which take as long as starting and ending a program of both gradients
    sum_blocks: int  # likewise, as adding up the partials of several ranges
    shortest_range: int  # of both gradients, in blocks
    lone_share: float  # of the SMs: with more entries, a large program alone on an SM beats two small ones


COSTS = fitted("gemm_reduce", SplitCosts)


@dataclass(frozen=True)
class ReduceProblem(Call):
    """One call ``D[z,p] = ⊕_r act(kept[z,p] · reduced[z,r] + bias)``, and which gradients will be asked for.

    ``kept`` and ``reduced`` are the lengths P and R of the axes that stay and that are reduced.
    """

    batch: int
    kept: int
    reduced: int
    K: int
    dtype: str
    op: str
    activation: str = "identity"
    masked: bool = False
    biased: bool = False
    indices: bool = False  # whether they are asked for; gradients of a maximum need them anyway
    product: bool = False  # whether the product is wanted too
    atomic: bool = False
    needs_kept_gradient: bool = False
    needs_reduced_gradient: bool = False
    needs_bias_gradient: bool = False

    operation = "gemm_reduce"

    __hash__ = Call.__hash__

    @property
    def training(self) -> bool:
        return self.needs_kept_gradient or self.needs_reduced_gradient or self.needs_bias_gradient

    @property
    def indexed(self) -> bool:
        """Whether gradients go through the index of one element."""
        return self.op in ("max", "min", "absmax")

    @property
    def finds_indices(self) -> bool:
        """Whether the forward pass finds indices."""
        return self.indices or (self.training and self.indexed)

    @property
    def elements(self) -> int:
        """How many elements the product has."""
        return self.batch * self.kept * self.reduced

    @property
    def model_flops(self) -> tuple[int, int]:
        product = 2 * self.elements * self.K
        return product, product * (self.needs_kept_gradient + self.needs_reduced_gradient)

    @property
    def linear(self) -> bool:
        """Whether the reduction can be taken before the product, and its gradients in closed form."""
        return self.op in ("sum", "mean") and self.activation == "identity"

    @property
    def kin(self) -> str:
        return f"gemm_reduce {_ALIKE.get(self.op, self.op)}{' training' if self.training else ''}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.kept, self.reduced, self.K

    @property
    def described(self) -> str:
        sizes = f"B={self.batch} kept {self.kept} reduced {self.reduced} K={self.K}"
        return f"{sizes}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "ReducePlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class ReducePlan(Decision):
    """The path is "fused", "algebraic" or "torch"."""

    yields: ClassVar[Yields] = {"forward_tiles": ("y",)}

    forward_tiles: ReduceConfig | None = None
    gradient_tiles: ReduceConfig | None = None
    one_pass_tiles: ReduceConfig | None = None  # of both gradients at once, in the place of gradient_tiles
    one_pass_splits: int = 1
    splits: int = 1
    accuracy: str = "exact"  # of activations in kernels: one of kernels.activations.ACCURACIES

    def gain(self, device: Device) -> str:
        # A product that is not computed is worth more than what is not kept for it.
        return self.reason if self.path == "algebraic" else super().gain(device)

    def kernel_facts(self) -> Facts:
        if self.forward_tiles is None:
            return []
        how = "added in any order (atomic=True)" if self.problem.atomic else "combined in a fixed order"
        return [
            ("tiles", reduce_text(self.forward_tiles, "kept", "reduced")),
            ("splits", f"{self.splits} ranges of the reduced axis, {how}"),
        ]


def plan(problem: ReduceProblem, device: Device, backend: str = "auto") -> ReducePlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = problem.why_no_kernels(device)
    cannot = {"fused": unsupported, "algebraic": why_not_algebraic(problem)}
    able = cannot["algebraic"] is None
    if backend == "auto":
        if problem.atomic and unsupported is None:
            # Atomic addition is asked for by name, whatever is faster.
            backend, cannot["algebraic"] = "triton", cannot["algebraic"] or "atomic=True asks for the kernels"
        elif problem.activation != "identity" or problem.biased or problem.product:
            cannot["fused"] = unsupported or f"bias, activation, or the product itself: {NOT_ON_RECORD}"
    choice = choose(problem, device, backend, cannot)
    if able and not choice.timed and choice.path == TORCH and backend == "auto":
        # No time is known of either, and the product of a sum is less work on any device.
        unknown = {path: why for path, why in choice.against.items() if path != "algebraic"}
        choice = Choice("algebraic", {**unknown, TORCH: "it would write the product, which is not needed"})
    return _costed(problem, device, choice, unsupported)


def why_not_algebraic(problem: ReduceProblem) -> str | None:
    """Why the reduction cannot be taken before the product, or None."""
    if problem.op not in ("sum", "mean"):
        return f"{problem.op} of a product is not the product of a {problem.op}"
    if problem.activation != "identity":
        return f"{problem.activation} stands between product and {problem.op}"
    if problem.product:
        return "the product is wanted too"
    return problem.why_as_written


def forward_tiles(problem: ReduceProblem, device: Device) -> ReduceConfig:
    """The tiles of the forward pass, and of the warp-specialised kernel where it computes the problem."""
    tiles = reduce_config(device.architecture, problem.format.bits, problem.K)
    plain = problem.activation == "identity" and not (problem.product or problem.atomic)
    if device.backend_for(problem.dtype) == GENERIC or not plain:
        return tiles
    costly = problem.masked or problem.finds_indices
    sm90 = sm90_reduce_config(problem.kept, problem.reduced, problem.K, device.sms, costly)
    return replace(tiles, sm90=sm90)


def choose_reduced_splits(problem: ReduceProblem, device: Device, tiles: ReduceConfig) -> int:
    """Ranges the reduced axis is split into: enough programs for every SM, bounded partials."""
    if problem.product:
        return 1  # a program writes its tiles of the product anyway: memory is the limit
    rows, resident = tiles.block_p, RESIDENT
    most = -(-problem.reduced // (tiles.block_r * COSTS.shortest_split))
    if tiles.sm90 is not None:
        rows, resident = tiles.sm90.consumers * CONSUMER_ROWS, 1
        most = problem.reduced // (tiles.sm90.block * COSTS.shortest_split)
    programs = problem.batch * -(-problem.kept // rows)
    partials = 8 * problem.batch * problem.kept  # a value and an index, or a maximum and a sum
    return filling_splits(programs, device.sms * resident, most, partials)


def choose_one_pass(problem: ReduceProblem, device: Device) -> tuple[ReduceConfig | None, int]:
    """The tiles of both gradients at once, where one tile has all the kept rows, and the ranges of reduced rows."""
    both = problem.needs_kept_gradient and problem.needs_reduced_gradient
    if problem.indexed or problem.linear or problem.needs_bias_gradient or not both:
        return None, 1
    alone = COSTS.lone_share * device.sms < problem.batch <= device.sms
    tiles = one_pass_config(device.architecture, problem.format.bits, problem.kept, problem.K, alone)
    if tiles is None:
        return None, 1
    partials = 4 * problem.batch * problem.kept * problem.K
    at_once = device.sms * (RESIDENT if tiles.num_warps <= 4 else 1)
    blocks = -(-problem.reduced // tiles.block_r)
    most = max(1, min(-(-blocks // COSTS.shortest_range), PARTIALS_LIMIT // partials))

    def blocks_one_after_another(splits: int) -> int:
        """Those of a range, for each wave of programs, and as many as beginning, ending and adding up take as long."""
        waves = -(-problem.batch * splits // at_once)
        return waves * (-(-blocks // splits) + COSTS.program_blocks) + COSTS.sum_blocks * (splits > 1)

    return tiles, min(range(1, most + 1), key=blocks_one_after_another)


def choose_accuracy(problem: ReduceProblem) -> str:
    """How closely activations and exponentials are computed."""
    chosen_by_errors = problem.op == "min" and problem.activation in _FALLING
    return "half" if problem.format.narrow and not chosen_by_errors else "exact"


def _flops(problem: ReduceProblem, path: str, one_pass: bool) -> int:
    """Floating-point operations of forward and backward."""
    product, gradients = problem.model_flops
    thin = 2 * problem.batch * max(problem.kept, problem.reduced) * problem.K
    wanted = problem.needs_kept_gradient + problem.needs_reduced_gradient
    if path == "algebraic":
        return thin * (2 + 2 * wanted)
    if path == "torch":
        return product + gradients
    if problem.linear:
        return product + 2 * thin * wanted
    if problem.indexed:
        return product * (1 + problem.needs_reduced_gradient)
    return product * (1 + wanted + (1 if one_pass else wanted))


def _costed(problem: ReduceProblem, device: Device, choice: Choice, unsupported: str | None) -> ReducePlan:
    element, path = problem.element_bytes, choice.path
    operands = element * problem.batch * (problem.kept + problem.reduced) * problem.K
    result = element * problem.batch * problem.kept
    moved = operands + result + element * problem.elements * problem.product
    moved += (2 * operands + result) * problem.training
    one_pass, one_pass_splits = choose_one_pass(problem, device) if path == "fused" else (None, 1)
    flops = _flops(problem, path, one_pass is not None)
    options: dict[str, Any] = {}
    if path == "fused":
        one_by_one = reduce_gradient_config(device.architecture, 8 * element, problem.K, problem.indexed)
        tiles = forward_tiles(problem, device)
        splits = choose_reduced_splits(problem, device, tiles)
        of_forward = (4 if problem.op in ("sum", "mean", "sumsq") else 8) * splits * (splits > 1 and not problem.atomic)
        of_backward = 4 * problem.K * one_pass_splits * (one_pass_splits > 1)
        options = {
            "forward_tiles": tiles,
            "gradient_tiles": one_by_one if one_pass is None else None,
            "one_pass_tiles": one_pass,
            "one_pass_splits": one_pass_splits,
            "splits": splits,
            "accuracy": choose_accuracy(problem),
            "workspace_bytes": max(of_forward, of_backward) * problem.batch * problem.kept,
        }
    reason = f"the {problem.op} of a product is the product of a {problem.op}: no product of matrices"
    if path == "fused":
        reason = (
            f"the kernels {'reduce the product as they write it' if problem.product else 'never write the product'}"
        )
    return ReducePlan.of(
        problem, device, choice, reason=reason, flops=flops, bytes=moved, saved_bytes=saved_bytes(problem, path),
        unsupported=unsupported, **options,
    )  # fmt: skip


def saved_bytes(problem: ReduceProblem, path: str) -> int:
    """What a path keeps for the backward pass: operands, sums or products, what belongs to a result, and the mask."""
    p = problem
    if not p.training:
        return 0
    element, mask = p.element_bytes, p.reduced * p.masked
    if path == "fused":
        # An index or a logarithm; of a float32 logsumexp the two numbers that it is made of.
        number = 4 if p.indexed else (8 if p.dtype == "float32" else 4) if p.op == "logsumexp" else 0
        return p.batch * (element * (p.kept + p.reduced) * p.K + number * p.kept + mask)
    # Each operand for the gradient of the other.
    if path == "algebraic":
        rows = p.kept * p.needs_reduced_gradient + p.needs_kept_gradient
        return p.batch * (element * rows * p.K + mask * p.needs_reduced_gradient)
    rows = p.kept * p.needs_reduced_gradient + p.reduced * p.needs_kept_gradient
    filled = p.op == "logsumexp" and p.masked  # a copy of the product, in which the mask has left its mark
    value = p.activation in SLOPE_FROM_VALUE or p.op in ("absmax", "sumsq") or (p.op == "logsumexp" and not p.masked)
    copies = SAVED_FOR_SLOPE.get(p.activation, 0) + value + filled
    number = 8 if p.indexed else element * (p.op == "logsumexp")
    return p.batch * (element * (rows * p.K + copies * p.kept * p.reduced) + number * p.kept + mask)


def reduce_text(tiles: ReduceConfig, kept: str, reduced: str) -> str:
    """The tiles of a product that is reduced, in words; ``kept`` and ``reduced`` name its axes."""
    config = tiles.sm90
    if config is None:
        size = f"{tiles.block_p} {kept} × {tiles.block_r} {reduced} × {tiles.block_k} inner"
        return tiles_text(size, tiles)
    size = f"{config.consumers * CONSUMER_ROWS} {kept} × {config.block} {reduced} × {config.width} inner"
    return sm90_text(size, config.consumers, config.stages)
