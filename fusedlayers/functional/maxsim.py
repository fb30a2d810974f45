"""Late interaction: the public function."""

import torch
from torch import Tensor

from .. import reference
from .arguments import check_maxsim, check_offsets
from .dispatch import captured


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    cu_seqlens_queries: Tensor | None = None,
    cu_seqlens_documents: Tensor | None = None,
) -> Tensor:
    """Late-interaction scores of all pairs: ``scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]``.

    Khattab and Zaharia, "ColBERT", 2020. The similarities, ``[Q, D, Lq, Ld]``, are never written. Each side is either
    padded, with or without a mask, or packed: all tokens behind one another, and the offsets where a query or document
    starts. The documents are shared by all queries.

    Args:
        queries: ``[Q, Lq, d]``, or ``[total, d]`` with ``cu_seqlens_queries``; any strides.
        documents: ``[D, Ld, d]``, or ``[total, d]`` with ``cu_seqlens_documents``.
        query_mask: boolean ``[Q, Lq]``, True where a token takes part, or None. What is masked may hold anything.
        document_mask: boolean ``[D, Ld]``, or None.
        cu_seqlens_queries: int32 or int64 ``[Q + 1]``: 0, the ends of the queries, the last of which is the total.
        cu_seqlens_documents: the same for documents, ``[D + 1]``.

    Returns:
        ``[Q, D]`` in the dtype of queries (under autocast: in autocast's dtype). A masked query token adds 0; a query
        with tokens scores -inf against a document without any, and neither gets a gradient from that. Of equal
        similarities the first gets the gradient, as with ``torch.max(dim)``.

    Raises:
        TypeError: an argument that is no tensor, a dtype that is not real floating or differs from that of queries, a
            mask that is not boolean, offsets that are not integers.
        ValueError: shapes that do not fit together, tensors on different devices, a mask beside offsets, offsets that
            do not start at 0, decrease, or do not end at the total. Offsets on a GPU are copied to the host for that,
            which waits for what was launched before, except while a CUDA graph is captured or torch.compile traces:
            then nobody looks at their values.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    check_maxsim(queries, documents, query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents)
    if not (torch.compiler.is_compiling() or queries.is_meta or captured(queries.device)):
        check_offsets("cu_seqlens_queries", cu_seqlens_queries, queries)
        check_offsets("cu_seqlens_documents", cu_seqlens_documents, documents)
    return reference.maxsim(
        queries, documents, query_mask, document_mask,
        cu_seqlens_queries=cu_seqlens_queries, cu_seqlens_documents=cu_seqlens_documents,
    )  # fmt: skip
