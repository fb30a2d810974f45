"""The gradient of the queries: for each token the weighted sum over all documents of the token that it chose there."""

from typing import Any, NamedTuple

import torch

from ..device import tl, triton
from ..launching import Launch, ceil_div, prepared
from ..matmul.generic.operands import strides
from ..partials import split_size, summed_over_splits
from ..tuning import GatherConfig
from .operands import MaxSimOperands, token_weights


class _Strides(NamedTuple):
    """The strides of the documents, of the mask of the queries, and of the offsets of packed documents."""

    documents: tuple[int, ...]
    mask: int
    offsets: int


@triton.jit(do_not_specialize=["stride_gq", "stride_gd", "stride_split", "D", "P", "LQ", "splits"])
def _query_gradient_kernel(
    documents_ptr, chosen_ptr, upstream_ptr, token_queries_ptr, query_mask_ptr, offsets_ptr, answering_ptr, out_ptr,
    strides, stride_gq, stride_gd, stride_split, D, P, LQ, splits,
    K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    stride_de, stride_dl, stride_dk = strides.documents
    program = tl.program_id(0)
    split = program % splits
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    cols = (program // splits % COLUMNS) * BLOCK_K + tl.arange(0, BLOCK_K)
    tokens = (program // splits // COLUMNS) * BLOCK_P + tl.arange(0, BLOCK_P)
    split_documents = tl.cdiv(tl.cdiv(D, DOCUMENTS), splits) * DOCUMENTS
    first = split.to(tl.int64) * split_documents
    end = tl.minimum(first + split_documents, D)
    acc = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for start in tl.range(0, (end - first).to(tl.int32), DOCUMENTS):
        # Several documents per step hide the latency: each load of rows waits for its indices.
        for step in tl.static_range(DOCUMENTS):
            document = first + (start + step)
            inside_split = document < end
            # Past the end the last document is loaded again, with weight 0.
            document = tl.minimum(document, end - 1)
            weight, active = token_weights(
                upstream_ptr, token_queries_ptr, query_mask_ptr, tokens, document, (stride_gq, stride_gd), strides.mask,
                LQ, P,
            )  # fmt: skip
            active &= inside_split
            if answering_ptr is not None:
                active &= tl.load(answering_ptr + document) != 0
            rows = tl.load(chosen_ptr + document * P + tokens, mask=active, other=0).to(tl.int64)
            if offsets_ptr is not None:
                rows += tl.load(offsets_ptr + document * strides.offsets).to(tl.int64)
            at = documents_ptr + document * stride_de + rows[:, None] * stride_dl
            inside = active[:, None] & (cols < K)[None, :]
            tile = tl.load(at + cols.to(tl.int64)[None, :] * stride_dk, mask=inside, other=0.0).to(tl.float32)
            acc += tl.where(active, weight.to(tl.float32), 0.0)[:, None] * tile
    out = tokens.to(tl.int64)[:, None] * K + cols[None, :] + split.to(tl.int64) * stride_split
    tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=(tokens < P)[:, None] & (cols < K)[None, :])


def query_gradient(
    operands: MaxSimOperands, chosen: torch.Tensor, upstream: torch.Tensor, splits: int, tiles: GatherConfig
) -> torch.Tensor:
    """``[P, d]``, contiguous, from the chosen tokens ``[D, P]`` and the gradient ``[Q, D]`` of the scores."""
    launch = prepared(operands.ready, "query gradient", _prepare, operands, upstream, splits, tiles)
    sums: dict[Any, Any] = prepared(operands.ready, "query sums", dict)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        given = (operands.documents, chosen, upstream, operands.token_queries(), operands.mask_bytes())
        launch((*given, operands.document_offsets, operands.answering(), *targets))

    (found,) = summed_over_splits(operands.queries, [operands.queries.shape], splits, fill, sums)
    assert found is not None
    return found


def _prepare(operands: MaxSimOperands, upstream: torch.Tensor, splits: int, tiles: GatherConfig) -> Launch:
    tokens, width = operands.queries.shape
    return Launch(
        _query_gradient_kernel,
        ceil_div(tokens, tiles.block_p) * ceil_div(width, tiles.block_k) * splits,
        (_Strides(
            strides(operands.documents, 3), *strides(operands.query_mask, 1), *strides(operands.document_offsets, 1)
        ),),
        (
            *upstream.stride(), split_size([(tokens, width)], splits), operands.document_count, tokens,
            operands.query_length, splits,
        ),
        (width, tiles.block_p, tiles.block_k, tiles.documents),
        tiles.num_warps,
    )  # fmt: skip
