"""The gradient of the documents: a product of the query tokens with one-hot weights, built tile by tile.

    ddocuments[e, j] = Σ_p queries[p] W[p, j],    W[p, j] = weights[e, p] where chosen[e, p] = j, else 0

A scatter of the tokens to the rows they chose would need atomics, or a sort; this is as many operations as the forward
pass, on the matrix units, in a fixed order.
"""

from typing import Any

import torch

from ..device import tl, triton
from ..gemm_reduce import sm90
from ..launching import Launch, ceil_div, prepared
from ..partials import summed_over_splits
from ..tiles import add_product, split_range
from ..tuning import OneHotConfig
from .operands import MaxSimOperands, as_bytes, stride, token_weights

_BLOCK = 1024  # weights of one program


@triton.jit(do_not_specialize=["stride_gq", "stride_gd", "P", "LQ"])
def _weights_kernel(
    upstream_ptr, token_queries_ptr, query_mask_ptr, answering_ptr, weights_ptr,
    stride_mask,
    stride_gq, stride_gd, P, LQ,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK)
    document = (program // blocks).to(tl.int64)
    tokens = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    weight, _ = token_weights(
        upstream_ptr, token_queries_ptr, query_mask_ptr, tokens, document, stride_gq, stride_gd, stride_mask, LQ, P
    )
    if answering_ptr is not None:
        weight = tl.where(tl.load(answering_ptr + document) != 0, weight, 0.0)
    tl.store(weights_ptr + document * P + tokens, weight.to(tl.float32), mask=tokens < P)


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


@triton.jit(do_not_specialize=["stride_split", "D", "L", "P", "blocks", "splits", "zero"])
def _document_gradient_kernel(
    queries_ptr, chosen_ptr, weights_ptr, offsets_ptr, ends_ptr, out_ptr,
    stride_qp, stride_qk, stride_offsets,
    stride_split, D, L, P, blocks, splits, zero,
    K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_P: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    cols = (program // splits % COLUMNS) * BLOCK_K + tl.arange(0, BLOCK_K)
    block = program // splits // COLUMNS
    start, end = split_range(split, P, splits, BLOCK_P)
    if offsets_ptr is not None:
        document, block = _block_of_packed(ends_ptr, block, D)
        # There are as many programs as the blocks of D documents can be; those that are left over have no rows.
        there = document < D
        document = tl.minimum(document, D - 1)
        first = tl.load(offsets_ptr + document * stride_offsets).to(tl.int64)
        length = (tl.load(offsets_ptr + (document + 1) * stride_offsets).to(tl.int64) - first).to(tl.int32)
        length = tl.where(there, length, 0)
        end = tl.where(there, end, start)
    else:
        document = (block // blocks).to(tl.int64)
        block = block % blocks
        first = document * L
        length = L
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    # The columns of the queries are the rows of this product: weights that are computed must be its second operand,
    # which lies in shared memory. From registers the matrix instructions would wait for one another.
    acc = tl.zeros([BLOCK_K, BLOCK_L], tl.float32)
    chosen_ptr += document * P
    weights_ptr += document * P
    for p in tl.range(start, end, BLOCK_P):
        tokens = p + tl.arange(0, BLOCK_P)
        at = queries_ptr + tokens.to(tl.int64)[None, :] * stride_qp + cols.to(tl.int64)[:, None] * stride_qk
        if EVEN_P and K % BLOCK_K == 0:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(tokens < P)[None, :] & (cols < K)[:, None], other=0.0)
        if EVEN_P:
            chosen = tl.load(chosen_ptr + tokens)
            weight = tl.load(weights_ptr + tokens)
        else:
            chosen = tl.load(chosen_ptr + tokens, mask=tokens < P, other=-1)
            weight = tl.load(weights_ptr + tokens, mask=tokens < P, other=0.0)
        one_hot = tl.where(chosen[:, None] == rows[None, :], weight[:, None], 0.0).to(tile.dtype)
        acc = add_product(acc, tile, one_hot, zero, INPUT_PRECISION)
    out = (first + rows)[None, :] * K + cols[:, None] + split.to(tl.int64) * stride_split
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=(rows < length)[None, :] & (cols < K)[:, None])


def document_gradient(
    operands: MaxSimOperands,
    chosen: torch.Tensor,
    upstream: torch.Tensor,
    splits: int,
    chunk: int,
    tiles: OneHotConfig,
) -> torch.Tensor:
    """Contiguous, like the documents, from the chosen tokens ``[D, P]`` and the gradient ``[Q, D]`` of the scores.

    ``chunk`` documents at a time, so that the float32 weights of all never lie in memory together.
    """
    documents = operands.document_count
    queries, token_queries, answering = operands.queries, operands.token_queries(), operands.answering()
    if operands.query_mask is not None:
        # A weight of 0 is not enough: what is masked may be NaN.
        queries = queries.masked_fill(~operands.query_mask[:, None], 0)

    def fill(targets: list[torch.Tensor | None], split_size: int) -> None:
        for first in range(0, documents, chunk):
            count = min(chunk, documents - first)
            part = operands.chunk(first, count)
            (out,) = targets
            assert out is not None
            if operands.document_offsets is None:
                out = out.view(-1)[first * operands.documents[0].numel() :]  # of the chunk, and what follows
            weights = _weights(
                part, upstream[:, first : first + count], token_queries,
                None if answering is None else answering[first : first + count],
            )  # fmt: skip
            _one_hot_product(part, queries, chosen[first : first + count], weights, out, split_size, splits, tiles)

    sums: dict[Any, Any] = prepared(operands.ready, "document sums", dict)
    (found,) = summed_over_splits(operands.documents, [tuple(operands.documents.shape)], splits, fill, sums)
    assert found is not None
    return found


def _weights(
    operands: MaxSimOperands,
    upstream: torch.Tensor,
    token_queries: torch.Tensor | None,
    answering: torch.Tensor | None,
) -> torch.Tensor:
    """g of each token's query and each document, float32 ``[D, P]``; 0 where one of the two does not take part."""
    tokens, documents = operands.queries.shape[0], operands.document_count
    weights = torch.empty(documents, tokens, dtype=torch.float32, device=upstream.device)
    launch = prepared(operands.ready, "weights", _prepare_weights, operands, upstream)
    launch((upstream, token_queries, as_bytes(operands.query_mask), answering, weights))
    return weights


def _prepare_weights(operands: MaxSimOperands, upstream: torch.Tensor) -> Launch:
    tokens = operands.queries.shape[0]
    return Launch(
        _weights_kernel,
        operands.document_count * ceil_div(tokens, _BLOCK),
        (stride(operands.query_mask),),
        (*upstream.stride(), tokens, operands.query_length),
        (_BLOCK,),
    )


def _one_hot_product(
    operands: MaxSimOperands,
    queries: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    split_size: int,
    splits: int,
    tiles: OneHotConfig,
) -> None:
    """Fills ``out``, or the partials of the splits, of which ``out`` is the first."""
    offsets, ends = operands.document_offsets, None
    launch, on_sm90 = prepared(
        operands.ready, "one-hot product", _prepare_one_hot_product, operands, queries, split_size, splits, tiles
    )
    if on_sm90:
        launch((queries, out, chosen, weights))
        return
    if offsets is not None:
        ends = ((offsets.diff() + (tiles.block_l - 1)) // tiles.block_l).cumsum(0)
    launch((queries, chosen, weights, offsets, ends, out))


def _prepare_one_hot_product(
    operands: MaxSimOperands, queries: torch.Tensor, split_size: int, splits: int, tiles: OneHotConfig
) -> tuple[Launch, bool]:
    """The launch, and whether it is that of the sm90 kernel."""
    documents, (tokens, width) = operands.document_count, queries.shape
    length, offsets = operands.documents.shape[-2], operands.document_offsets
    if splits == 1 and offsets is None and (kept := sm90.takes_one_hot(queries, tiles.sm90)) is not None:
        assert tiles.sm90 is not None
        return sm90.prepare_one_hot(kept, (documents, length, width), tokens, tiles.sm90), True
    blocks_each = ceil_div(length, tiles.block_l)
    # Of packed documents at most, without waiting for the lengths.
    blocks = documents * blocks_each if offsets is None else blocks_each + documents
    launch = Launch(
        _document_gradient_kernel,
        blocks * ceil_div(width, tiles.block_k) * splits,
        (*queries.stride(), stride(offsets)),
        (split_size, documents, length, tokens, blocks_each, splits, 0.0),
        (
            width, tiles.block_l, tiles.block_p, tiles.block_k, tokens % tiles.block_p == 0 and splits == 1,
            operands.input_precision,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
    return launch, False
