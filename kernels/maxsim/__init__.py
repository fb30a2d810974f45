"""Late interaction of all pairs of queries and documents, forward and backward, without the similarities.

    best[e,p]    = max_j queries[p] · documents[e,j],  chosen[e,p] the first such j     kernels/gemm_reduce
    scores[q,e]  = Σ_p best[e,p] over the tokens p of query q                           forward.py
    dqueries[p]  = Σ_e g[q(p),e] documents[e, chosen[e,p]]                              query_gradient.py
    ddocuments[e,j] = Σ_p (chosen[e,p] = j) g[q(p),e] queries[p]                        document_gradient.py

Letters: P tokens of all Q queries behind one another, queries [P, d]; D documents, [D, L, d] or packed [T, d] with
offsets [D + 1]; g [Q, D] is the upstream gradient, q(p) the query of token p. Masked tokens never contribute to a
result, whatever they hold.

The reduction has documents as its batch and all query tokens as its kept rows, so that tiles are full however short the
queries are. ``best`` (float32) exists for a bounded number of documents at a time; the backward pass needs ``chosen``
(int32) only. Everything is summed in float32 in a fixed order and rounded once.
"""

from .document_gradient import document_gradient
from .forward import forward
from .operands import MaxSimOperands
from .query_gradient import query_gradient

__all__ = ["MaxSimOperands", "document_gradient", "forward", "query_gradient"]
