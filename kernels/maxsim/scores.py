"""The scores: sums of the best similarities over the tokens of each query, in a fixed order."""

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from .operands import MaxSimOperands, as_bytes, stride

_TILE = 1024  # maxima that a program adds up at once: of several documents where a query is short
_SHORT, _LONG = 32, 128  # tokens of these, of one query


@triton.jit(do_not_specialize=["stride_sq", "D", "P", "LQ"])
def _scores_kernel(
    best_ptr, mask_ptr, offsets_ptr, scores_ptr,
    stride_mask, stride_offsets,
    stride_sq, D, P, LQ,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(D, BLOCK_D)
    query = (program // blocks).to(tl.int64)
    documents = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + query * stride_offsets).to(tl.int64)
        length = (tl.load(offsets_ptr + (query + 1) * stride_offsets).to(tl.int64) - first).to(tl.int32)
    else:
        first = query * LQ
        length = LQ
    total = tl.zeros([BLOCK_D], tl.float32)
    for t in tl.range(0, length, BLOCK_T):
        tokens = t + tl.arange(0, BLOCK_T)
        taking = tokens < length
        if mask_ptr is not None:
            taking &= tl.load(mask_ptr + (first + tokens) * stride_mask, mask=taking, other=0) != 0
        offsets = documents.to(tl.int64)[:, None] * P + (first + tokens)[None, :]
        total += tl.sum(tl.load(best_ptr + offsets, mask=(documents < D)[:, None] & taking[None, :], other=0.0), 1)
    at = scores_ptr + query * stride_sq + documents
    tl.store(at, total.to(scores_ptr.dtype.element_ty), mask=documents < D)


def sum_scores(operands: MaxSimOperands, best: torch.Tensor, scores: torch.Tensor) -> None:
    """Fills ``scores [Q, D]``, whose documents lie side by side, from ``best [D, P]``, contiguous float32."""
    launch = prepared(operands.ready, "scores", _prepare, operands, scores)
    launch((best, as_bytes(operands.query_mask), operands.query_offsets, scores))


def _prepare(operands: MaxSimOperands, scores: torch.Tensor) -> Launch:
    queries, documents = scores.shape
    length = operands.query_length
    block_t = _SHORT if operands.query_offsets is not None or length <= _SHORT else _LONG
    block_d = _TILE // block_t
    return Launch(
        _scores_kernel,
        queries * ceil_div(documents, block_d),
        (stride(operands.query_mask), stride(operands.query_offsets)),
        (scores.stride(0), documents, operands.queries.shape[0], length),
        (block_d, block_t),
    )
