"""How a loss head's tokens are cut into chunks, or its vocabulary into parts, and which sums are float32 meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .linear_cross_entropy import LossProblem

# Chunks are multiples of so many tokens: whole tiles of torch's products.
TOKEN_STEP = 128
# Tokens of a chunk, whose logits are within these bytes. Every chunk adds its part of dW to a sum, which is read and
# written for that: on an H200 two chunks of 2,048 tokens took 12 to 14 % longer than one of 4,096, for 2048 × 32,000
# and 768 × 50,257, and one of 8,192 no less than two of 4,096.
CHUNK_TOKENS = 4096
SMALLEST_CHUNK, LARGEST_CHUNK = 176 * 2**20, 1224 * 2**20
# Bytes of the gradient of some columns of the logits, with ``recompute`` and without, and the step of their number, a
# whole tile. Every part reads and writes the float32 sum of dx: on an H100 parts of 64 MiB took 3 to 25 % longer than
# parts of 512 MiB, at five published sizes, and parts of 1,024 MiB no less.
FEW_COLUMNS_BYTES, COLUMNS_BYTES = 64 * 2**20, 512 * 2**20
COLUMN_STEP = 256
# Without dW nothing is added up, and the products are as fast from some hundred tokens on.
CHUNK_WITHOUT_WEIGHT_GRADIENT = 128 * 2**20
# Where some thousand tokens have so few elements of dx, it has fewer tiles than a large GPU has SMs. cuBLAS then cuts
# the axis that the product sums over, and adds up parts that were rounded to 16 bits; for a float32 result it does not.
SMALL_DATA_GRADIENT, SOME_TOKENS = 2**21, 2048
# The sum of dW over chunks is float32, but for two chunks whose float32 sum would take so many bytes: what the first
# one gives is rounded to the dtype of dW, so that it is the shorter one.
LARGE_SUM, ROUNDED_CHUNKS = 3 * 2**29, 2


def choose_rows(problem: LossProblem) -> int:
    """Tokens of a chunk: as even as possible, and within the bytes of logits that the weight's size allows.

    Those of a training step, whoever asks: torch's products may round a row otherwise among other rows.
    """
    p = replace(
        problem, needs_data_gradient=True, needs_weight_gradient=problem.needs_weight_gradient or problem.trains_weight
    )
    row_bytes = p.element_bytes * p.padded_columns
    if p.needs_weight_gradient:
        limit = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, CHUNK_TOKENS * row_bytes))
        if p.M * row_bytes <= min(LARGEST_CHUNK, limit + 2 * p.V * p.K):
            # A single chunk needs no sum, and no more memory than several with theirs.
            limit = LARGEST_CHUNK
    else:
        limit = CHUNK_WITHOUT_WEIGHT_GRADIENT
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
    limit = FEW_COLUMNS_BYTES if p.recompute else COLUMNS_BYTES
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
    return p.needs_weight_gradient and p.format.narrow and columns * p.K <= SMALL_DATA_GRADIENT


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
    return p.needs_weight_gradient and not p.deferred and p.format.narrow and 4 * p.V * p.K > LARGE_SUM


def wide_data_gradient(problem: LossProblem) -> bool:
    """Whether dx is float32 until the backward pass rounds it."""
    p = problem
    small = min(p.M, SOME_TOKENS) * p.K <= SMALL_DATA_GRADIENT
    return p.needs_data_gradient and (p.deferred or (p.format.narrow and small))


def wide_gradients(problem: LossProblem) -> tuple[bool, bool, bool]:
    """Which gradients of input, linear_weight and linear_bias the forward pass leaves in float32."""
    return wide_data_gradient(problem), needs_wide_sum(problem, chunks_of(problem)), True


def chunks_of(problem: LossProblem) -> int:
    """How many chunks :func:`choose_rows` makes of the tokens."""
    return -(-problem.M // choose_rows(problem))
