"""How the loss of a linear layer's classes runs: which tokens have their logits in memory at once, and why.

The chunked path takes the tokens in chunks. torch's product writes the logits of a chunk, one kernel makes the losses
of them and, where gradients are wanted, puts the gradient in their place, and two products take dx and the chunk's part
of dW from it. The gradient of a mean or a sum is known but for a factor, so that all of this happens in the forward
pass; losses of single tokens wait for their upstream gradients, and the backward pass computes the logits again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..kernels.tuning.cross_entropy import RowTiles, row_tiles
from .call import Call, Decision, Facts, Yields, direction, no_kernels, too_small, why_not_kernels
from .devices import Device, floor_seconds
from .measured import LinearCrossEntropy

# Rows of logits start at a multiple of so many elements, so that products read and write them in whole vectors whatever
# the vocabulary: GPT-2's 50,257 columns side by side made every product take three to four times as long.
ALIGNED_COLUMNS = 64
# Chunks are multiples of so many tokens: whole tiles of torch's products.
TOKEN_STEP = 128
# Bytes of logits at once. Every chunk adds its part of dW to a sum, which is read and written for that: a chunk of T
# tokens computes 6 T operations for each of the 8 bytes, so that a larger weight wants longer chunks. One and a half
# times its size is within these bounds.
SMALLEST_CHUNK, LARGEST_CHUNK = 176 * 2**20, 2**30
# Without dW nothing is added up, and the products are as fast from some hundred tokens on.
CHUNK_WITHOUT_WEIGHT_GRADIENT = 128 * 2**20
# Up to so many chunks the sum of dW is rounded to its own dtype after each, from more on it is float32.
ROUNDED_CHUNKS = 2


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
    weighted: bool = False  # whether classes have weights
    probabilities: bool = False  # whether targets are probabilities of all classes
    entropy: bool = False
    capped: bool = False
    squared: bool = False  # whether the z-loss is added
    needs_data_gradient: bool = False
    needs_weight_gradient: bool = False
    needs_bias_gradient: bool = False
    workspace_limit: int = 0
    operation: str = "linear_cross_entropy"

    __hash__ = Call.__hash__

    @property
    def empty(self) -> bool:
        return 0 in (self.M, self.K, self.V)

    @property
    def training(self) -> bool:
        return self.needs_data_gradient or self.needs_weight_gradient or self.needs_bias_gradient

    @property
    def early(self) -> bool:
        """Whether gradients are computed in the forward pass."""
        return self.training and self.reduction != "none"

    @property
    def deferred(self) -> bool:
        """Whether what a mean divides by waits for the backward pass, as the upstream gradient's loss scale does.

        float16 has no numbers for a small probability's share of thousands of tokens, nor for large sums of shares: all
        gradients stay float32 until then.
        """
        return self.early and self.dtype == "float16"

    @property
    def model_flops(self) -> tuple[int, int]:
        product = 2 * self.M * self.K * self.V
        return product, product * (self.needs_data_gradient + self.needs_weight_gradient)

    @property
    def tokens(self) -> int:
        return self.M

    @property
    def padded_columns(self) -> int:
        """The length of a row of logits in memory."""
        return -(-self.V // ALIGNED_COLUMNS) * ALIGNED_COLUMNS

    @property
    def described(self) -> str:
        return f"M={self.M} (tokens) K={self.K} V={self.V} (vocabulary), {self.dtype}, {direction(self)}"

    def plan(self, device: Device, backend: str) -> "LossPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class LossPlan(Decision):
    """The path is "chunked", ``rows`` tokens at a time, or "torch"."""

    yields: ClassVar[Yields] = {}

    rows: int = 0
    wide_sum: bool = False  # whether dW is added up in float32
    tiles: RowTiles | None = None
    accuracy: str = "exact"  # of exponentials in the kernel: one of kernels.activations.ACCURACIES

    @property
    def chunks(self) -> int:
        """How many chunks the tokens are cut into."""
        return -(-self.problem.M // self.rows) if self.rows else 0

    def runs(self) -> str:
        return "in chunks of tokens" if self.path == "chunked" else super().runs()

    def why_torch(self, device: Device) -> str:
        return self.unsupported or dict(self.rejected).get("chunked", self.reason)

    def kernel_facts(self) -> Facts:
        if self.tiles is None:
            return []
        p = self.problem
        logits = f"{p.element_bytes * self.rows * p.padded_columns:,} bytes of logits at once"
        rows = [("chunks", f"{self.chunks} × {self.rows:,} tokens, {logits}")]
        if p.needs_weight_gradient and self.chunks > 1:
            how = "in float32, rounded once" if self.wide_sum or p.element_bytes > 2 else f"in {p.dtype}"
            rows.append(("sum of dW", f"over chunks, inside the products, {how}"))
        if p.training:
            rows.append(("gradients", "in the forward pass" if p.early else "in the backward pass, from logits anew"))
        return [*rows, ("tiles", f"one row, {self.tiles.block} columns at a time, {self.tiles.num_warps} warps")]


def plan(problem: LossProblem, device: Device, backend: str = "auto") -> LossPlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = why_unsupported(problem, device)
    figures = device.figures.linear_cross_entropy
    torch_because = why_not_kernels(problem, device, backend, unsupported, figures, why_slower)
    p, chunked = problem, torch_because is None
    rows = choose_rows(problem) if chunked else 0
    chunks = -(-p.M // rows) if rows else 0
    wide_sum = needs_wide_sum(problem, chunks)
    product = 2 * p.M * p.K * p.V
    flops = sum(p.model_flops) + (product if chunked and p.training and not p.early else 0)
    moved = p.element_bytes * (p.M * p.K + p.V * p.K) * (2 if p.training else 1)
    moved += p.element_bytes * (p.M * p.K * p.needs_data_gradient + p.V * p.K * p.needs_weight_gradient)
    options: dict[str, Any] = {}
    if chunked:
        sum_bytes = 4 * p.V * p.K if wide_sum and not p.deferred else 0
        options = {
            "rows": rows,
            "wide_sum": wide_sum,
            "tiles": row_tiles(p.V),
            "accuracy": "exact" if p.dtype == "float32" else "half",
            "workspace_bytes": p.element_bytes * rows * p.padded_columns + sum_bytes,
        }
    return LossPlan(
        problem=problem,
        path="chunked" if chunked else "torch",
        reason="the logits of one chunk of tokens are in memory at once"
        if chunked
        else "no other path is both possible and faster",
        rejected=(("torch", "it would write all logits, and their gradient"),)
        if torch_because is None
        else (("chunked", torch_because),),
        flops=flops,
        bytes=moved,
        saved_bytes=saved_bytes(problem, chunked),
        floor_seconds=floor_seconds(flops, moved, p.dtype, device),
        unsupported=unsupported,
        **options,
    )


def why_unsupported(problem: LossProblem, device: Device) -> str | None:
    """Why the kernel cannot run ``problem``, or None."""
    if (reason := no_kernels(problem, device)) is not None:
        return reason
    return "the kernel takes classes as targets, not their probabilities" if problem.probabilities else None


def why_slower(problem: LossProblem, device: Device, figures: LinearCrossEntropy) -> str | None:
    """Why torch is expected to be faster."""
    if figures.fewest_classes > problem.V:
        return f"rows of {problem.V:,} classes are short: torch runs those of fewer than {figures.fewest_classes:,}"
    if figures.faster_from is None:
        return "it was not measured beside torch's operations; FUSEDLAYERS_BACKEND=triton runs it"
    return too_small(problem.M * problem.V, "logits", figures.faster_from, problem.captured)


def choose_rows(problem: LossProblem) -> int:
    """Tokens of a chunk: as even as possible, and within the bytes of logits that the weight's size allows."""
    p = problem
    row_bytes = p.element_bytes * p.padded_columns
    if p.needs_weight_gradient:
        limit = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 3 * p.element_bytes * p.V * p.K // 2))
    else:
        limit = CHUNK_WITHOUT_WEIGHT_GRADIENT
    if p.workspace_limit:
        # What the user allows is for the sum of dW, too, where more chunks than two need one.
        limit = p.workspace_limit
        if needs_wide_sum(p, chunks_within(p, limit // row_bytes)):
            limit -= 4 * p.V * p.K
    return even_rows(p.M, limit // row_bytes)


def even_rows(tokens: int, most: int) -> int:
    """Tokens of a chunk: whole steps, at most ``most`` unless that is less than one step, in chunks of one size."""
    steps = max(1, most // TOKEN_STEP)
    chunks = -(-tokens // (steps * TOKEN_STEP))
    return min(tokens, -(-tokens // (chunks * TOKEN_STEP)) * TOKEN_STEP)


def chunks_within(problem: LossProblem, most: int) -> int:
    """How many chunks of at most ``most`` tokens there are."""
    return -(-problem.M // even_rows(problem.M, most))


def needs_wide_sum(problem: LossProblem, chunks: int) -> bool:
    """Whether the sum of dW over so many chunks is float32, and no sum of results that were rounded."""
    wide = problem.deferred or (problem.element_bytes < 4 and chunks > ROUNDED_CHUNKS)
    return problem.needs_weight_gradient and wide


def saved_bytes(problem: LossProblem, chunked: bool) -> int:
    """What is kept for the backward pass beside the weights: the input, and gradients or what they are made of."""
    p = problem
    if not p.training:
        return 0
    kept = p.element_bytes * p.M * p.K
    if not chunked:
        # The logarithms of the probabilities; what the softcap and the square of the logsumexp need, each as large.
        return kept + max(4, p.element_bytes) * p.M * p.V * (1 + p.capped + p.squared)
    if not p.early:
        return kept + (12 if p.entropy else 8) * p.M
    gradients = p.M * p.K * p.needs_data_gradient + p.V * p.K * p.needs_weight_gradient
    return kept + (4 if p.deferred else p.element_bytes) * gradients
