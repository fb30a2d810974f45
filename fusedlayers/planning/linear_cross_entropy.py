"""How the loss of a linear layer's classes runs: which tokens have their logits in memory at once, and why.

The fused path writes no logits: a kernel reduces the tiles of the product on chip, in float32. The backward pass
computes the product again, and writes the gradient of some columns of the logits at a time, each of which completes its
row of dW and adds to dx. Losses of single tokens and log-probabilities take it, whose gradients wait for their upstream
ones, and with ``recompute`` every loss.

The chunked path takes the tokens in chunks. torch's product writes the logits of a chunk, one kernel makes the losses
of them and, where gradients are wanted, puts the gradient in their place, and two products take dx and the chunk's part
of dW from it. The gradient of a mean or a sum is known but for a factor, so that all of this happens in the forward
pass.

The logits of one path are float32, those of the other one are rounded to the dtype of the operands. So neither the path
nor what it computes depends on whose gradients are wanted, or on whether any is: a policy's log-probabilities are the
same bits while it samples and while it is trained.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import CONSUMER_ROWS
from ..kernels.tuning.cross_entropy import (
    LogitTiles,
    RowTiles,
    generic_shares,
    gradient_tiles,
    logit_tiles,
    row_tiles,
    sm90_shares,
)
from ..kernels.tuning.dtypes import GENERIC
from . import linear_cross_entropy_chunks as cutting
from .call import Call, Decision, Facts, Yields, sm90_text, tiles_text
from .choosing import choose
from .devices import Device

# Rows of logits are a multiple of so many elements long. Products of a vocabulary that divides into no vectors of 16
# bytes read a copy of the weight with as many rows: the fast kernels of cuBLAS ask for whole vectors of the weight's
# rows, whatever the stride of the rows of logits.
ALIGNED_COLUMNS = 64
VECTOR_BYTES = 16
# Programs of the generic fused kernel that run on an SM at once.
RESIDENT = 2


@dataclass(frozen=True)
class LossProblem(Call):
    """One call for input ``[M, K]`` and a weight ``[V, K]``, and which gradients will be asked for.

    ``reduction`` is that of the losses; log-probabilities have none. ``workspace_limit`` is the user's bound of
    temporary bytes, 0 for none.
    """

    M: int
    K: int
    V: int
    dtype: str
    reduction: str = "none"
    biased: bool = False
    positions: int | None = None  # losses of each token, where the weight is [V, d1, ..., K]
    probabilities: bool = False  # whether targets are probabilities of all classes
    entropy: bool = False
    argmax: bool = False
    capped: bool = False
    squared: bool = False  # whether the z-loss is added
    recompute: bool = False  # whether no gradient may be computed, nor any logits be written, in the forward pass
    parted: bool = False  # whether the classes are those of one of several processes
    trains_weight: bool = False  # whether the weight requires a gradient, also while nobody asks for gradients
    needs_data_gradient: bool = False
    needs_weight_gradient: bool = False
    needs_bias_gradient: bool = False
    workspace_limit: int = 0
    operation: str = "linear_cross_entropy"

    __hash__ = Call.__hash__

    @property
    def losses(self) -> int:
        """Rows of logits."""
        return self.M if self.positions is None else self.M * self.positions

    @property
    def training(self) -> bool:
        return self.needs_data_gradient or self.needs_weight_gradient or self.needs_bias_gradient

    @property
    def early(self) -> bool:
        """Whether gradients are computed in the forward pass."""
        return self.training and self.reduction != "none" and not self.recompute

    @property
    def deferred(self) -> bool:
        """Whether what a mean divides by waits for the backward pass, as the upstream gradient's loss scale does.

        A small range has no numbers for a small probability's share of thousands of tokens, nor for large sums of
        shares: all gradients stay float32 until then.
        """
        return self.early and self.format.small_range

    @property
    def decisive(self) -> "LossProblem":
        """The training step: values may not depend on whether gradients are wanted, so neither may the path."""
        return replace(self, needs_data_gradient=True, needs_weight_gradient=True, needs_bias_gradient=self.biased)

    @property
    def model_flops(self) -> tuple[int, int]:
        product = 2 * self.losses * self.K * self.V
        return product, product * (self.needs_data_gradient + self.needs_weight_gradient)

    @property
    def tokens(self) -> int:
        return self.M

    @property
    def padded_columns(self) -> int:
        """The length of a row of logits in memory."""
        return self.aligned(self.V)

    @staticmethod
    def aligned(columns: int) -> int:
        """The length in memory of a row of so many columns."""
        return -(-columns // ALIGNED_COLUMNS) * ALIGNED_COLUMNS

    @property
    def pads_weight(self) -> bool:
        """Whether torch's products are slow unless weight and bias have a row for every padded column."""
        return self.V * self.element_bytes % VECTOR_BYTES != 0

    @property
    def pad_bytes(self) -> int:
        """Bytes of the copy of the weight."""
        return self.element_bytes * self.padded_columns * self.K * self.pads_weight

    @property
    def kin(self) -> str:
        return f"linear_cross_entropy {kernel_path(self)}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.losses, self.K, self.V

    @property
    def described(self) -> str:
        several = "" if self.positions is None else f" × {self.positions} positions"
        return f"M={self.M} (tokens) K={self.K} V={self.V} (vocabulary){several}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "LossPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class LossPlan(Decision):
    """The path is "fused", "chunked", ``rows`` tokens at a time, or "torch"."""

    yields: ClassVar[Yields] = {"logit_tiles": ("y", "log_probs", "entropies")}

    rows: int = 0
    columns: int = 0  # of the logits whose gradient is in memory at once, on the fused path
    wide_sum: bool = False  # whether dW is added up in float32
    wide_data_gradient: bool = False  # whether dx is float32 until it is rounded
    tiles: RowTiles | None = None
    logit_tiles: LogitTiles | None = None  # of the fused path
    gradient_tiles: LogitTiles | None = None  # of its backward pass
    ranges: int = 1  # into which its generic kernel divides the columns
    accuracy: str = "exact"  # of exponentials in the kernel: one of kernels.activations.ACCURACIES

    @property
    def chunks(self) -> int:
        """How many chunks the tokens are cut into."""
        return -(-self.problem.M // self.rows) if self.rows else 0

    @property
    def pads_weight(self) -> bool:
        """Whether products read copies of weight and bias that have a row for every padded column."""
        return self.path == "chunked" and self.problem.pads_weight

    def runs(self) -> str:
        return "in chunks of tokens" if self.path == "chunked" else super().runs()

    def why_torch(self, device: Device) -> str:
        return super().why_torch(device) if self.unsupported or self.timed else self.rejected[0][1]

    def kernel_facts(self) -> Facts:
        p = self.problem
        if self.logit_tiles is not None:
            recomputed: Facts = []
            if self.columns:
                gradient = f"{p.element_bytes * p.M * self.columns:,} bytes of their gradient at once"
                count = -(-p.V // self.columns)
                recomputed = [("gradients", f"in the backward pass, {count} × {self.columns:,} columns, {gradient}")]
            return [
                ("logits", "none in memory"), *recomputed, ("tiles", logit_text(self.logit_tiles, self.ranges))
            ]  # fmt: skip
        if self.tiles is None:
            return []
        logits = f"{p.element_bytes * self.rows * p.padded_columns:,} bytes of logits at once"
        rows = [("chunks", f"{self.chunks} × {self.rows:,} tokens, {logits}")]
        if p.pads_weight:
            rows.append(("weight", f"copied with {p.padded_columns:,} rows, so that products read whole vectors"))
        if p.needs_weight_gradient and self.chunks > 1:
            how = "in float32, rounded once" if self.wide_sum or not p.format.narrow else f"in {p.dtype}"
            rows.append(("sum of dW", f"over chunks, inside the products, {how}"))
        if p.training:
            rows.append(("gradients", "in the forward pass"))
        return [*rows, ("tiles", f"one row, {self.tiles.block} columns at a time, {self.tiles.num_warps} warps")]


def plan(problem: LossProblem, device: Device, backend: str = "auto") -> LossPlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = why_unsupported(problem, device)
    choice = choose(problem, device, backend, {kernel_path(problem): unsupported})
    p, path = problem, choice.path
    rows = cutting.choose_rows(problem) if path == "chunked" else 0
    chunks = -(-p.M // rows) if rows else 0
    wide_sum = cutting.needs_wide_sum(problem, chunks)
    product = 2 * p.losses * p.K * p.V
    flops = sum(p.model_flops) + (product if path != "torch" and p.training and not p.early else 0)
    moved = p.element_bytes * (p.M * p.K + p.V * p.K) * (2 if p.training else 1)
    moved += p.element_bytes * (p.M * p.K * p.needs_data_gradient + p.V * p.K * p.needs_weight_gradient)
    options: dict[str, Any] = {"accuracy": "half" if p.format.narrow else "exact"}
    if path == "fused":
        options |= fused_options(problem, device)
    elif path == "chunked":
        # Of a loss that is reduced they are kept for the backward pass.
        unrounded = 0 if p.early else 4 * (p.V * p.K * wide_sum + p.M * p.K * cutting.wide_data_gradient(p))
        options |= {
            "rows": rows,
            "wide_sum": wide_sum,
            "wide_data_gradient": cutting.wide_data_gradient(p),
            "tiles": row_tiles(p.V),
            "workspace_bytes": p.element_bytes * rows * p.padded_columns + unrounded + p.pad_bytes,
        }
    reason = "the logits of one chunk of tokens are in memory at once"
    if path == "fused":
        reason = "no logits are in memory: their tiles are reduced on chip"
        reason += ", and computed again in the backward pass" if p.training else ""
    return LossPlan.of(
        problem, device, choice, reason=reason, flops=flops, bytes=moved,
        saved_bytes=saved_bytes(problem, path != "torch"), unsupported=unsupported, **options,
    )  # fmt: skip


def kernel_path(problem: LossProblem) -> str:
    """The path on which kernels run the problem."""
    each = problem.reduction == "none" and not problem.parted
    return "fused" if problem.recompute or each else "chunked"


def fused_options(problem: LossProblem, device: Device) -> dict[str, Any]:
    """The tiles of the fused path, how many programs share a row of them, and the bytes of their partial results."""
    p = problem
    specialised = device.backend_for(p.dtype) != GENERIC
    tiles = logit_tiles(device.architecture, p.format.bits, device.sms, specialised)
    bands, columns = -(-p.M // tiles.block_m), -(-p.V // tiles.block_n)
    ranges = max(1, min(RESIDENT * device.sms // bands, columns))
    shares = generic_shares(tiles, p.M, p.V, ranges)
    if tiles.sm90 is not None:
        shares = sm90_shares(tiles.sm90, p.M, p.V)
    forward = 4 * (2 + p.entropy + p.argmax) * shares.partials + 4 * p.M
    options = {
        "logit_tiles": tiles,
        "ranges": ranges,
        # Where they fail the self-test, calls without gradients leave this path, too.
        "gradient_tiles": gradient_tiles(device.architecture, p.format.bits, device.sms, specialised),
        "workspace_bytes": forward,
    }
    if not p.training:
        return options
    gradient_columns = cutting.choose_columns(problem)
    backward = cutting.part_bytes(problem, gradient_columns)
    backward += 4 * p.M * p.K * (p.needs_data_gradient and p.format.narrow)
    return options | {
        "columns": gradient_columns,
        "wide_sum": cutting.wide_part(problem, gradient_columns),
        "wide_data_gradient": p.needs_data_gradient and p.format.narrow,
        "workspace_bytes": max(forward, backward),
    }


def logit_text(tiles: LogitTiles, ranges: int) -> str:
    """The tiles of logits in words."""
    config = tiles.sm90
    if config is None:
        size = f"{tiles.block_m} tokens × {tiles.block_n} columns × {tiles.block_inner} inner"
        return f"{tiles_text(size, tiles)}, columns in {ranges} ranges"
    return sm90_text(f"{2 * CONSUMER_ROWS} tokens × {config.columns} columns × {config.step} inner", 2, config.stages)


def why_unsupported(problem: LossProblem, device: Device) -> str | None:
    """Why the kernel cannot run ``problem``, or None."""
    if (reason := problem.why_no_kernels(device)) is not None:
        return reason
    if problem.positions is not None:
        return "the kernel takes one loss of each token, and a weight [V, K]"
    return "the kernel takes classes as targets, not their probabilities" if problem.probabilities else None


def saved_bytes(problem: LossProblem, chunked: bool) -> int:
    """What is kept for the backward pass beside the weights: input and target, and gradients or what makes them."""
    p = problem
    if not p.training:
        return 0
    input, classes = p.element_bytes * p.M * p.K, 8 * p.losses
    if not chunked:
        # The logarithms of the probabilities; what the softcap, the square of the logsumexp, targets that are
        # probabilities and the entropy need, each as large; and where an entropy has terms, in a byte for each.
        copies, size = 1 + p.capped + p.squared + p.probabilities + 2 * p.entropy, max(4, p.element_bytes)
        kept = p.losses * p.V * (size * copies + p.entropy)
        return kept + input * p.needs_weight_gradient + classes * (not p.probabilities)
    if not p.early:
        return input + classes + (12 if p.entropy else 8) * p.M
    of_input, of_weight, _ = cutting.wide_gradients(p)
    kept = input + classes + (4 if of_input else p.element_bytes) * p.M * p.K * p.needs_data_gradient
    kept += (4 if of_weight else p.element_bytes) * p.V * p.K * p.needs_weight_gradient
    return kept + 4 * p.V * p.needs_bias_gradient
