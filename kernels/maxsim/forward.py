"""Forward: the maximum of each query token over each document, and its sums over the tokens of a query."""

import torch

from ..device import tl, triton
from ..gemm_reduce import ReduceArithmetic, ReduceOperands, reduce
from ..gemm_reduce.operands import entry_rows
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.operands import strides
from ..tuning import ReduceConfig
from .operands import MaxSimOperands

_TILE = 1024  # maxima that a program sums at once; short queries: of several documents
_SHORT, _LONG = 32, 128  # tokens per step, of one query


@triton.jit(do_not_specialize=["stride_sq", "D", "P", "LQ"])
def _scores_kernel(
    best_ptr, mask_ptr, offsets_ptr, scores_ptr, stride_mask, stride_offsets, stride_sq, D, P, LQ,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(D, BLOCK_D)
    query = (program // blocks).to(tl.int64)
    documents = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    first, length, _ = entry_rows(query, None, offsets_ptr, (0, stride_offsets), LQ)
    if offsets_ptr is None:
        first = query * LQ
    total = tl.zeros([BLOCK_D], tl.float32)
    for t in tl.range(0, length, BLOCK_T):
        tokens = t + tl.arange(0, BLOCK_T)
        active = tokens < length
        if mask_ptr is not None:
            active &= tl.load(mask_ptr + (first + tokens) * stride_mask, mask=active, other=0) != 0
        offsets = documents.to(tl.int64)[:, None] * P + (first + tokens)[None, :]
        total += tl.sum(tl.load(best_ptr + offsets, mask=(documents < D)[:, None] & active[None, :], other=0.0), 1)
    at = scores_ptr + query * stride_sq + documents
    tl.store(at, total.to(scores_ptr.dtype.element_ty), mask=documents < D)


def forward(
    operands: MaxSimOperands, *, indices: bool, splits: int, chunk: int, tiles: ReduceConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores ``[Q, D]``, contiguous, in the dtype of the queries; the chosen tokens, int32 ``[D, P]``, if requested).

    ``chunk`` documents at a time, which bounds the memory of the float32 maxima.
    """
    like, documents = operands.queries, operands.document_count
    scores = torch.empty(operands.query_count, documents, dtype=like.dtype, device=like.device)
    chosen: list[torch.Tensor] = []
    for span, part in operands.chunks(chunk):
        # All query tokens against each document: a batch stride of 0 shares the matrix of tokens.
        maximum = ReduceOperands(
            like.expand(part.document_count, -1, -1), part.documents, None, None, part.document_mask, None,
            part.document_offsets, ReduceArithmetic("max", "identity", part.input_precision, "exact"), part.ready,
        )  # fmt: skip
        best, found = reduce(maximum, indices=indices, out_dtype=torch.float32, splits=splits, tiles=tiles)
        launch = prepared(part.ready, "scores", _prepare_scores, part, scores[:, span])
        launch((best, part.mask_bytes(), part.query_offsets, scores[:, span]))
        if found is not None:
            chosen.append(found)
    if not chosen:
        return scores, None
    return scores, chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _prepare_scores(operands: MaxSimOperands, scores: torch.Tensor) -> Launch:
    """The launch that adds ``best [D, P]``, contiguous float32, up to scores ``[Q, D]`` in a fixed order."""
    queries, documents = scores.shape
    length = operands.query_length
    block_t = _SHORT if operands.query_offsets is not None or length <= _SHORT else _LONG
    block_d = _TILE // block_t
    return Launch(
        _scores_kernel,
        queries * ceil_div(documents, block_d),
        strides(operands.query_mask, 1) + strides(operands.query_offsets, 1),
        (scores.stride(0), documents, operands.queries.shape[0], length),
        (block_d, block_t),
    )
