"""`MaxSim`, late interaction."""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional


class MaxSim(nn.Module):
    """Late interaction (Khattab and Zaharia, 2020, "ColBERT"): the scores of all pairs of queries and documents.

    ``scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]``, without the similarities in memory. No parameters.
    """

    # What forward calls, for ``explain``.
    function = staticmethod(functional.maxsim)

    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None = None,
        document_mask: Tensor | None = None,
        *,
        cu_seqlens_queries: Tensor | None = None,
        cu_seqlens_documents: Tensor | None = None,
    ) -> Tensor:
        """:func:`fusedlayers.functional.maxsim` of these arguments: scores ``[Q, D]``."""
        return functional.maxsim(
            queries, documents, query_mask, document_mask,
            cu_seqlens_queries=cu_seqlens_queries, cu_seqlens_documents=cu_seqlens_documents,
        )  # fmt: skip
