"""How a loss head's tokens are cut into chunks, or its vocabulary into parts, and which sums are float32 meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .measured import fitted

if TYPE_CHECKING:
    from .linear_cross_entropy import LossProblem

# Chunks are multiples of so many tokens: whole tiles of torch's products.
TOKEN_STEP = 128
# Parts of the vocabulary are multiples of so many columns: whole tiles.
COLUMN_STEP = 256
# The sum of dW over chunks is float32, but for so many chunks whose float32 sum would be large: what the first one
# gives is rounded to the dtype of dW, so that it is the shorter one.
ROUNDED_CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class ChunkSizes:
    """How large chunks and parts are, and which results are large or small.

    A chunk has ``chunk_tokens``, as far as the bytes of its logits are from ``smallest_chunk`` to ``largest_chunk``:
    each chunk reads and writes the sum of dW. ``chunk_without_weight_gradient`` are its bytes where there is no such
    sum.

    ``columns_bytes`` are the bytes of a part's gradient, without ``recompute`` and with it: each part reads and writes
    the float32 sum of dx.

    If ``some_tokens`` have at most ``small_data_gradient`` elements of dx, it has fewer tiles than a large GPU has SMs.
    cuBLAS then splits the axis that the product sums over, and adds up parts that were rounded to 16 bits; it does not
    for a float32 result.

    A float32 sum of dW of more than ``large_sum`` bytes is large.
    """

    chunk_tokens: int
    smallest_chunk: int
    largest_chunk: int
    chunk_without_weight_gradient: int
    columns_bytes: tuple[int, int]
    small_data_gradient: int
    some_tokens: int
    large_sum: int


SIZES = fitted("linear_cross_entropy", ChunkSizes)


def choose_rows(problem: LossProblem) -> int:
    """Tokens of a chunk: as even as possible, and within the bytes of logits that the weight's size allows.

    Those of a training step, whoever asks: torch's products may round a row otherwise among other rows.
    """
    p = replace(
        problem, needs_data_gradient=True, needs_weight_gradient=problem.needs_weight_gradient or problem.trains_weight
    )
    row_bytes = p.element_bytes * p.padded_columns
    if p.needs_weight_gradient:
        limit = min(SIZES.largest_chunk, max(SIZES.smallest_chunk, SIZES.chunk_tokens * row_bytes))
        if p.M * row_bytes <= min(SIZES.largest_chunk, limit + 2 * p.V * p.K):
            # A single chunk needs no sum, and no more memory than several with theirs.
            limit = SIZES.largest_chunk
    else:
        limit = SIZES.chunk_without_weight_gradient
    if p.workspace_limit:
        # What the user allows is for the sum of dW, too, where more chunks than two need one.
        limit = p.workspace_limit - p.pad_bytes
        if needs_wide_sum(p, chunks_within(p, limit // row_bytes)):
            limit -= 4 * p.V * p.K
        limit -= 4 * p.M * p.K * wide_data_gradient(p)
    rows = even_rows(p.M, limit // row_bytes)
    if -(-p.M // rows) == ROUNDED_CHUNKS and rounds_first_chunk(p):
        return limit // row_bytes // TOKEN_STEP * TOKEN_STEP
    return rows


def choose_columns(problem: LossProblem) -> int:
    """Columns of the logits whose gradient is in memory at once on the fused path: whole tiles."""
    p = problem
    limit = SIZES.columns_bytes[p.recompute]
    if p.workspace_limit:
        limit = p.workspace_limit - 4 * p.M * p.K * (p.needs_data_gradient and p.format.narrow)
    columns = max(COLUMN_STEP, limit // (p.element_bytes * p.M) // COLUMN_STEP * COLUMN_STEP)
    columns = min(columns, p.padded_columns)
    while columns > COLUMN_STEP and part_bytes(p, columns) > limit:
        columns = (columns - 1) // COLUMN_STEP * COLUMN_STEP
    return columns


def wide_part(problem: LossProblem, columns: int) -> bool:
    """Whether so many rows of dW are float32 until they are rounded: cuBLAS cuts the product, as one of a small dx."""
    p = problem
    return p.needs_weight_gradient and p.format.narrow and columns * p.K <= SIZES.small_data_gradient


def part_bytes(problem: LossProblem, columns: int) -> int:
    """The temporary bytes of so many columns at a time: their gradient, and copies of rows of dW and of the weight."""
    p, size = problem, problem.element_bytes
    wide = 4 * p.K * wide_part(problem, columns)
    last = p.aligned(p.V % columns or columns)
    # Only the last columns may be no whole vectors, for which rows are padded.
    padded = (
        0 if p.padded_columns == p.V else size * p.K * (p.needs_data_gradient + (p.needs_weight_gradient and not wide))
    )
    return max((size * p.M + wide) * min(columns, p.padded_columns), (size * p.M + wide + padded) * last)


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
    p = problem
    rounded = chunks == 1 or (chunks == ROUNDED_CHUNKS and rounds_first_chunk(p))
    return p.needs_weight_gradient and (p.deferred or (p.format.narrow and not rounded))


def rounds_first_chunk(problem: LossProblem) -> bool:
    """Whether two chunks do without a float32 sum of dW."""
    p = problem
    return p.needs_weight_gradient and not p.deferred and p.format.narrow and SIZES.large_sum < 4 * p.V * p.K


def wide_data_gradient(problem: LossProblem) -> bool:
    """Whether dx is float32 until the backward pass rounds it."""
    p = problem
    small = min(p.M, SIZES.some_tokens) * p.K <= SIZES.small_data_gradient
    return p.needs_data_gradient and (p.deferred or (p.format.narrow and small))


def wide_gradients(problem: LossProblem) -> tuple[bool, bool, bool]:
    """Which gradients of input, linear_weight and linear_bias the forward pass leaves in float32."""
    return wide_data_gradient(problem), needs_wide_sum(problem, chunks_of(problem)), True


def chunks_of(problem: LossProblem) -> int:
    """How many chunks :func:`choose_rows` makes of the tokens."""
    return -(-problem.M // choose_rows(problem))
