"""The gradient of the documents: a product of one-hot weights, built in registers, with the query tokens.

    ddocuments[e, j] = Σ_p W[j, p] queries[p],    W[j, p] = g[q(p), e] where chosen[e, p] = j, else 0

A scatter of the tokens to the rows they chose would need atomics, or a sort; this is as many operations as the forward
pass, on the matrix units, in a fixed order.
"""

import torch

from ..device import tl, triton
from ..gemm_gemm.partials import summed_over_splits
from ..launching import launch
from ..tiles import add_product
from ..tuning import OneHotConfig
from .operands import MaxSimOperands, as_bytes, stride, token_weights


@triton.jit
def _block_of_packed(ends_ptr, block, documents):
    """(document, its block) of a block of rows, by bisection of where the blocks of each document end."""
    low = tl.zeros([], tl.int64)
    high = documents.to(tl.int64)
    while low < high:
        middle = (low + high) // 2
        past = tl.load(ends_ptr + middle) <= block
        low = tl.where(past, middle + 1, low)
        high = tl.where(past, high, middle)
    before = tl.load(ends_ptr + low - 1, mask=(low > 0) & (low < documents), other=0)
    return low, (block - before).to(tl.int32)


@triton.jit(do_not_specialize=["stride_split", "D", "L", "P", "LQ", "blocks", "splits", "zero"])
def _document_gradient_kernel(
    queries_ptr, chosen_ptr, upstream_ptr, token_queries_ptr, query_mask_ptr, document_mask_ptr, offsets_ptr, ends_ptr,
    out_ptr,
    stride_qp, stride_qk,
    stride_gq, stride_gd,
    stride_query_mask, stride_mask_e, stride_mask_l, stride_offsets,
    stride_split, D, L, P, LQ, blocks, splits, zero,
    K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    cols = (program // splits % COLUMNS) * BLOCK_K + tl.arange(0, BLOCK_K)
    block = program // splits // COLUMNS
    if offsets_ptr is not None:
        document, block = _block_of_packed(ends_ptr, block, D)
        # There are as many programs as the blocks of D documents can be; those that are left over have no rows.
        there = document < D
        document = tl.minimum(document, D - 1)
        first = tl.load(offsets_ptr + document * stride_offsets).to(tl.int64)
        length = (tl.load(offsets_ptr + (document + 1) * stride_offsets).to(tl.int64) - first).to(tl.int32)
        length = tl.where(there, length, 0)
    else:
        document = (block // blocks).to(tl.int64)
        block = block % blocks
        first = document * L
        length = L
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    row_ok = rows < length
    split_tokens = tl.cdiv(tl.cdiv(P, BLOCK_P), splits) * BLOCK_P
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, P)
    if offsets_ptr is not None:
        end = tl.where(there, end, start)
    acc = tl.zeros([BLOCK_L, BLOCK_K], tl.float32)
    for p in tl.range(start, end, BLOCK_P):
        tokens = p + tl.arange(0, BLOCK_P)
        weight, taking = token_weights(
            upstream_ptr, token_queries_ptr, query_mask_ptr, tokens, document, stride_gq, stride_gd, stride_query_mask,
            LQ, P,
        )  # fmt: skip
        chosen = tl.load(chosen_ptr + document * P + tokens, mask=taking, other=-1)
        at = queries_ptr + tokens.to(tl.int64)[:, None] * stride_qp + cols.to(tl.int64)[None, :] * stride_qk
        tile = tl.load(at, mask=taking[:, None] & (cols < K)[None, :], other=0.0)
        weights = tl.where(chosen[None, :] == rows[:, None], weight[None, :], 0.0).to(tile.dtype)
        acc = add_product(acc, weights, tile, zero, INPUT_PRECISION)
    if document_mask_ptr is not None:
        # A document that is masked throughout has its first token as the chosen one.
        mask_at = document_mask_ptr + document * stride_mask_e + rows.to(tl.int64) * stride_mask_l
        answering = tl.load(mask_at, mask=row_ok, other=0) != 0
        acc = tl.where(answering[:, None], acc, 0.0)
    out = (first + rows)[:, None] * K + cols[None, :] + split.to(tl.int64) * stride_split
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (cols < K)[None, :])


def document_gradient(
    operands: MaxSimOperands, chosen: torch.Tensor, upstream: torch.Tensor, splits: int, tiles: OneHotConfig
) -> torch.Tensor:
    """Contiguous, like the documents, from the chosen tokens ``[D, P]`` and the gradient ``[Q, D]`` of the scores."""
    documents = operands.documents
    count, tokens, width = operands.document_count, *operands.queries.shape
    mask = operands.document_mask
    length, ends = documents.shape[-2], None
    if operands.document_offsets is not None:
        lengths = operands.document_offsets.diff()
        ends = ((lengths + (tiles.block_l - 1)) // tiles.block_l).cumsum(0)
        blocks = length // tiles.block_l + count
    else:
        blocks = triton.cdiv(length, tiles.block_l) * count

    def fill(targets: list[torch.Tensor | None], split_size: int) -> None:
        launch(
            _document_gradient_kernel,
            blocks * triton.cdiv(width, tiles.block_k) * splits,
            (
                operands.queries, chosen, upstream, operands.token_queries(), as_bytes(operands.query_mask),
                as_bytes(mask), operands.document_offsets, ends, *targets,
            ),
            (
                *operands.queries.stride(), *upstream.stride(), stride(operands.query_mask),
                *((0, 0) if mask is None else mask.stride()), stride(operands.document_offsets),
            ),
            (
                split_size, count, length, tokens, operands.query_length,
                triton.cdiv(length, tiles.block_l), splits, 0.0,
            ),
            (width, tiles.block_l, tiles.block_p, tiles.block_k, operands.input_precision),
            tiles.num_warps,
            tiles.num_stages,
        )  # fmt: skip

    (found,) = summed_over_splits(documents, [tuple(documents.shape)], splits, fill)
    assert found is not None
    return found
