"""Forward: the maximum of each query token over each document, and its sums over the tokens of a query."""

import torch

from ..gemm_reduce import ReduceArithmetic, ReduceOperands, reduce
from ..tuning import ReduceConfig
from .operands import MaxSimOperands
from .scores import sum_scores


def forward(
    operands: MaxSimOperands, *, indices: bool, splits: int, chunk: int, tiles: ReduceConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores ``[Q, D]``, contiguous, in the dtype of the queries; the chosen tokens, int32 ``[D, P]``, if asked for).

    ``chunk`` documents at a time, so that the float32 maxima of all never lie in memory together.
    """
    queries, documents = operands.query_count, operands.document_count
    like = operands.queries
    scores = torch.empty(queries, documents, dtype=like.dtype, device=like.device)
    chosen: list[torch.Tensor] = []
    for first in range(0, documents, chunk):
        count = min(chunk, documents - first)
        part = operands.chunk(first, count)
        best, found = reduce(
            _maximum(part, count), indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles
        )
        sum_scores(part, best, scores[:, first : first + count])
        if found is not None:
            chosen.append(found)
    if not chosen:
        return scores, None
    return scores, chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _maximum(operands: MaxSimOperands, documents: int) -> ReduceOperands:
    """All query tokens against each document, for which one matrix of tokens serves."""
    return ReduceOperands(
        kept=operands.queries.expand(documents, -1, -1),
        reduced=operands.documents,
        kept_bias=None,
        reduced_bias=None,
        mask=operands.document_mask,
        lengths=None,
        offsets=operands.document_offsets,
        arithmetic=ReduceArithmetic("max", "identity", operands.input_precision, "exact"),
        ready=operands.ready,
    )
