"""The tensors of a call, and which tokens and documents are not masked."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..device import tl, triton


@triton.jit
def token_weights(
    upstream_ptr, token_queries_ptr, query_mask_ptr, tokens, document, upstream_strides, stride_mask, LQ, P
):  # fmt: skip
    """(g of each token's query and one document, which tokens are not masked); the first is 0 where they are."""
    active = tokens < P
    if query_mask_ptr is not None:
        active &= tl.load(query_mask_ptr + tokens.to(tl.int64) * stride_mask, mask=active, other=0) != 0
    if token_queries_ptr is not None:
        queries = tl.load(token_queries_ptr + tokens, mask=active, other=0).to(tl.int64)
    else:
        queries = (tokens // LQ).to(tl.int64)
    at = upstream_ptr + queries * upstream_strides[0] + document * upstream_strides[1]
    return tl.load(at, mask=active, other=0.0), active


# Not frozen: to set the fields of a frozen one takes three times as long, in every call.
@dataclass(slots=True, eq=False)
class MaxSimOperands:
    """The tensors of one call, checked.

    queries ``[P, d]`` of any strides: ``query_length`` tokens of each query, or packed with the offsets
    ``query_offsets``. documents ``[D, L, d]``, or packed ``[T, d]`` with ``document_offsets``. query_mask bool ``[P]``,
    document_mask bool ``[D, L]``.

    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``. Gradients of the scores are contiguous and
    aligned. Chunks may differ in layout, so the operands of a chunk have no ``ready``.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    query_length: int
    query_mask: torch.Tensor | None
    document_mask: torch.Tensor | None
    query_offsets: torch.Tensor | None
    document_offsets: torch.Tensor | None
    input_precision: str
    ready: dict[Any, Any] | None = None

    @property
    def query_count(self) -> int:
        if self.query_offsets is not None:
            return self.query_offsets.shape[0] - 1
        return self.queries.shape[0] // self.query_length

    @property
    def document_count(self) -> int:
        offsets = self.document_offsets
        return self.documents.shape[0] if offsets is None else offsets.shape[0] - 1

    def chunks(self, size: int) -> Iterator[tuple[slice, "MaxSimOperands"]]:
        """For each chunk of ``size`` documents: which ones, and the operands with these documents only."""
        count = self.document_count
        for first in range(0, count, size):
            span = slice(first, min(first + size, count))
            yield span, self if span == slice(0, count) else self._part(span)

    def _part(self, span: slice) -> "MaxSimOperands":
        if self.document_offsets is not None:
            offsets = self.document_offsets[span.start : span.stop + 1]
            return replace(self, document_offsets=offsets, ready=None)
        mask = None if self.document_mask is None else self.document_mask[span]
        return replace(self, documents=self.documents[span], document_mask=mask, ready=None)

    def token_queries(self) -> torch.Tensor | None:
        """The query of each token, int64 ``[P]``; None if all queries have equally many."""
        if self.query_offsets is None:
            return None
        tokens = torch.arange(self.queries.shape[0], device=self.queries.device, dtype=self.query_offsets.dtype)
        return torch.searchsorted(self.query_offsets.contiguous(), tokens, right=True) - 1

    def answering(self) -> torch.Tensor | None:
        """Which documents have a token that is not masked, uint8 ``[D]``; None if all have."""
        if self.document_offsets is not None:
            return (self.document_offsets.diff() > 0).view(torch.uint8)
        return None if self.document_mask is None else self.document_mask.any(1).view(torch.uint8)

    def mask_bytes(self) -> torch.Tensor | None:
        """The mask of the queries as kernels read it, uint8 ``[P]``."""
        return None if self.query_mask is None else self.query_mask.view(torch.uint8)
