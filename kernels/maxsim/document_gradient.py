"""The gradient of the documents: a product of the query tokens with one-hot weights, built tile by tile.

    ddocuments[e, j] = Σ_p queries[p] W[p, j],    W[p, j] = weights[e, p] where chosen[e, p] = j, else 0

Scattering the tokens to the rows that they chose would take atomics or a sort. This product takes as many operations as
the forward pass, on the matrix units, in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from ..device import tl, triton
from ..gemm_reduce import sm90
from ..gemm_reduce.operands import entry_rows
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.operands import strides
from ..partials import summed_over_splits
from ..tiles import add_product, load_tile, split_range
from ..tuning import OneHotConfig
from .operands import MaxSimOperands, token_weights

_BLOCK = 1024  # weights per program


@triton.jit(do_not_specialize=["stride_gq", "stride_gd", "P", "LQ"])
def _weights_kernel(
    upstream_ptr, token_queries_ptr, query_mask_ptr, answering_ptr, weights_ptr, stride_mask, stride_gq, stride_gd, P,
    LQ, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK)
    document = (program // blocks).to(tl.int64)
    tokens = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    weight, _ = token_weights(
        upstream_ptr, token_queries_ptr, query_mask_ptr, tokens, document, (stride_gq, stride_gd), stride_mask, LQ, P
    )
    if answering_ptr is not None:
        weight = tl.where(tl.load(answering_ptr + document) != 0, weight, 0.0)
    tl.store(weights_ptr + document * P + tokens, weight.to(tl.float32), mask=tokens < P)


@triton.jit
def _block_of_packed(ends_ptr, block, documents):
    """(document, block within it) of a block of packed rows, by bisection of the ends of all documents' blocks."""
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
    queries_ptr, out_ptr, chosen_ptr, weights_ptr, offsets_ptr, ends_ptr,
    strides, stride_split, D, L, P, blocks, splits, zero,
    K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_P: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    stride_qp, stride_qk, stride_offsets = strides
    program = tl.program_id(0)
    split = program % splits
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    cols = (program // splits % COLUMNS) * BLOCK_K + tl.arange(0, BLOCK_K)
    block = program // splits // COLUMNS
    start, end = split_range(split, P, splits, BLOCK_P)
    if offsets_ptr is not None:
        document, block = _block_of_packed(ends_ptr, block, D)
        # The grid has as many programs as D documents can have blocks; those left over have no rows.
        there = document < D
        document = tl.minimum(document, D - 1)
        end = tl.where(there, end, start)
    else:
        document = (block // blocks).to(tl.int64)
        block = block % blocks
    first, length, _ = entry_rows(document, None, offsets_ptr, (0, stride_offsets), L)
    if offsets_ptr is not None:
        length = tl.where(there, length, 0)
    else:
        first = document * L
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    # The product is transposed: computed weights must be its right operand, in shared memory. As a left operand in
    # registers they would serialise the matrix instructions.
    EVEN: tl.constexpr = EVEN_P and K % BLOCK_K == 0
    acc = tl.zeros([BLOCK_K, BLOCK_L], tl.float32)
    chosen_ptr += document * P
    weights_ptr += document * P
    for p in tl.range(start, end, BLOCK_P):
        tokens = p + tl.arange(0, BLOCK_P)
        tile = load_tile(queries_ptr, cols, tokens, stride_qk, stride_qp, K, P, EVEN, EVEN)
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
    operands: MaxSimOperands, chosen: Tensor, upstream: Tensor, splits: int, chunk: int, tiles: OneHotConfig
) -> Tensor:
    """Contiguous, like the documents, from the chosen tokens ``[D, P]`` and the gradient ``[Q, D]`` of the scores.

    ``chunk`` documents at a time, which bounds the memory of the float32 weights.
    """
    queries, token_queries, answering = operands.queries, operands.token_queries(), operands.answering()
    tokens, packed = queries.shape[0], operands.document_offsets is not None
    if operands.query_mask is not None:
        # A weight of 0 is not enough: masked queries may be NaN.
        queries = queries.masked_fill(~operands.query_mask[:, None], 0)

    def fill(targets: list[Tensor | None], split_size: int) -> None:
        (out,) = targets
        assert out is not None
        for span, part in operands.chunks(chunk):
            gradient, active = upstream[:, span], None if answering is None else answering[span]
            # g of each token's query and each document, 0 if one of them is masked.
            weights = torch.empty(part.document_count, tokens, dtype=torch.float32, device=queries.device)
            launch = prepared(part.ready, "weights", _prepare_weights, part, gradient)
            launch((gradient, token_queries, part.mask_bytes(), active, weights))
            # The rows from the chunk on; offsets of packed documents count from the first row of all.
            rows = out if packed else out.view(-1)[span.start * operands.documents[0].numel() :]
            offsets, ends = part.document_offsets, None
            if offsets is not None:
                ends = ((offsets.diff() + (tiles.block_l - 1)) // tiles.block_l).cumsum(0)
            product = prepared(part.ready, "product", _prepare_product, part, queries, split_size, splits, tiles)
            product((queries, rows, chosen[span], weights, offsets, ends))

    sums: dict[Any, Any] = prepared(operands.ready, "document sums", dict)
    (found,) = summed_over_splits(operands.documents, [tuple(operands.documents.shape)], splits, fill, sums)
    assert found is not None
    return found


def _prepare_weights(operands: MaxSimOperands, upstream: Tensor) -> Launch:
    tokens = operands.queries.shape[0]
    return Launch(
        _weights_kernel,
        operands.document_count * ceil_div(tokens, _BLOCK),
        strides(operands.query_mask, 1),
        (*upstream.stride(), tokens, operands.query_length),
        (_BLOCK,),
    )


def _prepare_product(
    operands: MaxSimOperands, queries: Tensor, split_size: int, splits: int, tiles: OneHotConfig
) -> Launch:
    """The launch that fills the gradient, or the partials of all splits; sm90 if that kernel supports the call."""
    documents, (tokens, width) = operands.document_count, queries.shape
    length, offsets = operands.documents.shape[-2], operands.document_offsets
    if splits == 1 and offsets is None and (kept := sm90.takes_one_hot(queries, tiles.sm90)) is not None:
        assert tiles.sm90 is not None
        return sm90.prepare_one_hot(kept, (documents, length, width), tokens, tiles.sm90)
    blocks_each = ceil_div(length, tiles.block_l)
    # An upper bound for packed documents, without waiting for their lengths.
    blocks = documents * blocks_each if offsets is None else blocks_each + documents
    return Launch(
        _document_gradient_kernel,
        blocks * ceil_div(width, tiles.block_k) * splits,
        ((*queries.stride(), *strides(offsets, 1)),),
        (split_size, documents, length, tokens, blocks_each, splits, 0.0),
        (
            width, tiles.block_l, tiles.block_p, tiles.block_k, tokens % tiles.block_p == 0 and splits == 1,
            operands.input_precision,
        ),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
