"""Reductions of products: GEMM-reduce and late interaction."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.activations import ACTIVATIONS, canonical_activation


def maxsim(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    cu_seqlens_queries: Tensor | None = None,
    cu_seqlens_documents: Tensor | None = None,
) -> Tensor:
    """``scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]`` -> ``[Q, D]``; any dtype.

    queries ``[Q, Lq, d]`` and documents ``[D, Ld, d]`` with masks ``[Q, Lq]`` and ``[D, Ld]``, True where a token takes
    part; or packed ``[total, d]`` with the offsets ``cu_seqlens``. Similarities and scores are rounded to the dtype of
    the operands; torch accumulates the sums in at least float32. Masked tokens may hold any value. A masked query token
    scores 0, and any query token scores -inf against a document without tokens; both have no gradient. The first of
    equal similarities gets the gradient.
    """
    if cu_seqlens_queries is not None:
        queries, query_mask = _padded(queries, cu_seqlens_queries)
    if cu_seqlens_documents is not None:
        documents, document_mask = _padded(documents, cu_seqlens_documents)
    if not _jit_tracing() and documents.shape[1] == 0:
        # A maximum needs at least one element: add a masked token.
        documents = F.pad(documents, (0, 0, 0, 1))
        document_mask = torch.zeros(documents.shape[:2], dtype=torch.bool, device=documents.device)
    if query_mask is not None:
        queries = queries.masked_fill(~query_mask[:, :, None], 0)
    if document_mask is not None:
        documents = documents.masked_fill(~document_mask[:, :, None], 0)
    similarities = torch.einsum("qik,ejk->qeij", queries, documents)
    if document_mask is not None:
        similarities = similarities.masked_fill(~document_mask[:, None, :], -torch.inf)
    # Without a gradient use amax: it is faster than max, but would divide the gradient among equal values.
    graph = torch.is_grad_enabled() and similarities.requires_grad
    best = similarities.max(-1).values if graph else similarities.amax(-1)
    if query_mask is not None:
        best = best.masked_fill(~query_mask[:, None, :], 0)
    return best.sum(-1, dtype=best.dtype)


def _padded(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``[total, d]`` as ``[n, longest, d]``, zero-padded, and the mask of the tokens that are not padding."""
    lengths = cu_seqlens.diff()
    # The total bounds every length, if lengths have no values (meta), or will differ in later calls (torch.jit).
    longest = packed.shape[0] if packed.is_meta or _jit_tracing() else int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=packed.device) < lengths[:, None]
    return packed.new_zeros(*mask.shape, packed.shape[-1]).index_put((mask,), packed), mask


def _jit_tracing() -> bool:
    return torch._C._get_tracing_state() is not None


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``; bmm if nothing broadcasts, because matmul's views cost the host more than a small product."""
    # Under torch.jit compare no sizes, because it would trace the comparison and warn.
    alike = left.dim() == right.dim() == 3 and not _jit_tracing() and left.shape[0] == right.shape[0]
    return torch.bmm(left, right) if alike else left @ right


def gemm_reduce(
    a: Tensor,
    b: Tensor,
    *,
    op: str = "sum",
    dim: int = -2,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    return_indices: bool = False,
    return_product: bool = False,
    without_index: bool = False,
    wide_exponentials: bool = False,
) -> Any:
    """``⊕ act(a @ b + bias)`` over ``dim``: a ``[*B, M, K]``, b ``[*B, K, N]`` -> ``[*B, N]`` or ``[*B, M]``.

    Masked elements are replaced by the identity of the operation.
    ``without_index``: no gradient is required, so no index is needed, and the faster amax and amin run.
    ``wide_exponentials``: a logsumexp and its gradient are computed in at least float32.
    """
    c = batched_product(a, b)
    c = ACTIVATIONS[canonical_activation(activation)].torch(c if bias is None else c + bias)
    values = {"absmax": torch.abs, "sumsq": torch.square}.get(op, lambda values: values)(c)
    count: Any = c.shape[dim]
    if mask is not None or lengths is not None:
        taking = _taking_part(mask, lengths, c.shape[dim], c.device)
        fill = 0.0 if op in ("sum", "mean", "sumsq") else torch.inf if op in ("min", "argmin") else -torch.inf
        values = values.masked_fill(~taking.unsqueeze(-1 if dim == -2 else -2), fill)
        count = taking.sum(-1, keepdim=True)
    if op == "logsumexp":
        dtype = torch.promote_types(c.dtype, torch.float32) if wide_exponentials else c.dtype
        found: Any = values.to(dtype).logsumexp(dim).to(c.dtype)
    elif op in ("sum", "sumsq"):
        found = values.sum(dim)
    elif op == "mean":
        # Divide before rounding: the sum may overflow where the mean does not.
        summed = values.sum(dim, dtype=torch.promote_types(c.dtype, torch.float32))
        found = (summed / count).to(c.dtype)
    elif op in ("argmax", "argmin"):
        found = getattr(values, op.removeprefix("arg"))(dim).indices
    elif without_index and not return_indices:
        found = values.amin(dim) if op == "min" else values.amax(dim)
    else:
        best = values.min(dim) if op == "min" else values.max(dim)
        found = tuple(best) if return_indices else best.values
    if return_product:
        return (*found, c) if isinstance(found, tuple) else (found, c)
    return found


def _taking_part(mask: Tensor | None, lengths: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """The mask of the rows that are reduced: boolean, ``[..., rows]``, broadcasts to ``[*B, rows]``."""
    if lengths is None:
        assert mask is not None
        # Expand a mask of one value for all rows, so that counting it counts every row.
        return mask.expand(*mask.shape[:-1], rows)
    taking = torch.arange(rows, device=device) < signed_lengths(lengths).unsqueeze(-1)
    return taking if mask is None else taking & mask


def signed_lengths(lengths: Tensor) -> Tensor:
    """Lengths in a dtype that torch can compute with; it can only copy uint16, uint32 and uint64."""
    if lengths.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        return lengths
    wide = lengths.to(torch.int64)
    # uint64 values from 2⁶³ on became negative in the conversion.
    return wide.masked_fill(wide < 0, 2**63 - 1)


def gemm_sum(
    a: Tensor,
    b: Tensor,
    *,
    op: str = "sum",
    dim: int = -2,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The sum or mean of :func:`gemm_reduce` without an activation, by ``Σ_m (a b) = (Σ_m a) b``: no large product."""
    rows, other = (a, b) if dim == -2 else (b.mT, a.mT)
    count: Any = rows.shape[-2]
    if mask is not None or lengths is not None:
        taking = _taking_part(mask, lengths, rows.shape[-2], rows.device)
        rows = torch.where(taking.unsqueeze(-1), rows, 0)
        count = taking.sum(-1, keepdim=True)
    mean = op == "mean"
    total = rows.sum(-2, dtype=torch.promote_types(rows.dtype, torch.float32))
    some = count if isinstance(count, int) else count.clamp(min=1)
    # A sum of float16 values may overflow even if its product with b does not: divide it by about √rows first. A mean
    # needs no scaling, because it is as large as its values.
    scale = 2.0 ** (rows.shape[-2].bit_length() // 2) if rows.dtype == torch.float16 and not mean else 1.0
    if mean or scale != 1:
        total = total / (some if mean else scale)
    found = batched_product(total.to(rows.dtype).unsqueeze(-2), other).squeeze(-2)
    if scale != 1:
        found = found * scale
    if bias is not None and dim == -2:
        found = found + (bias if mean else bias * count)
    elif bias is not None:
        taken = bias if isinstance(count, int) else bias * taking
        summed = taken.sum(-1, keepdim=True, dtype=total.dtype)
        found = found + (summed / some if mean else summed).to(found.dtype)
    # The mean of nothing is NaN, and its gradients are 0.
    return torch.where(count > 0, found, torch.nan) if mean and not isinstance(count, int) else found
