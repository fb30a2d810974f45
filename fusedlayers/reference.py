"""Each operation in a few lines of torch: the specification, the oracle in float64, the CPU path, and the baseline."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.dropout import keep_mask


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """``act(a @ b) @ c``: a ``[*B, M, K]``, b ``[*B, K, N]``, c ``[*B, N, O]`` -> ``[*B, M, O]``; any dtype."""
    return _batched_product(ACTIVATIONS[canonical_activation(activation)].torch(_batched_product(a, b)), c)


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
    part; or packed ``[total, d]`` with the offsets ``cu_seqlens``. Similarities are rounded to the dtype of the
    operands, and so are the scores, whose sums torch accumulates in at least float32. What a mask leaves out may hold
    anything. A query token scores 0 where it is masked and -inf against a document without tokens, without a gradient
    in both cases. The first of equal similarities gets the gradient.
    """
    if cu_seqlens_queries is not None:
        queries, query_mask = _padded(queries, cu_seqlens_queries)
    if cu_seqlens_documents is not None:
        documents, document_mask = _padded(documents, cu_seqlens_documents)
    if documents.shape[1] == 0:
        # A maximum needs something to choose from: one token that is masked.
        documents = F.pad(documents, (0, 0, 0, 1))
        document_mask = torch.zeros(documents.shape[:2], dtype=torch.bool, device=documents.device)
    if query_mask is not None:
        queries = queries.masked_fill(~query_mask[:, :, None], 0)
    if document_mask is not None:
        documents = documents.masked_fill(~document_mask[:, :, None], 0)
    similarities = torch.einsum("qik,ejk->qeij", queries, documents)
    if document_mask is not None:
        similarities = similarities.masked_fill(~document_mask[:, None, :], -torch.inf)
    # The gradient of amax is shared out among equal values; without one it is the faster of the two.
    graph = torch.is_grad_enabled() and similarities.requires_grad
    best = similarities.max(-1).values if graph else similarities.amax(-1)
    if query_mask is not None:
        best = best.masked_fill(~query_mask[:, None, :], 0)
    return best.sum(-1, dtype=best.dtype)


def _padded(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``[total, d]`` as ``[n, longest, d]`` with zeros behind each sequence, and the mask of what is no padding."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=packed.device) < lengths[:, None]
    return packed.new_zeros(*mask.shape, packed.shape[-1]).index_put((mask,), packed), mask


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, which broadcasts: views that cost the host more than a small product costs the device."""
    alike = left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0]
    return torch.bmm(left, right) if alike else left @ right


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
    seed: Tensor | None = None,
    first_row: int = 0,
) -> Tensor:
    """``dropout(act(x W_upᵀ + b_up)) W_downᵀ + b_down + residual``.

    With a gate the hidden is ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)``. Shapes: x ``[*B, M, K]``, w_up and w_gate
    ``[N, K]``, w_down ``[O, N]``, residual and result ``[*B, M, O]``; any dtype. Dropout draws from torch's generator;
    with ``seed`` it replays the kernels' mask instead, counting the rows of x from ``first_row``.
    """
    up = F.linear(x, w_up, b_up)
    gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
    hidden = _hidden(up, gate, activation, dropout_p, seed, first_row)
    y = F.linear(hidden, w_down, b_down)
    return y if residual is None else y + residual


def _hidden(
    up: Tensor, gate: Tensor | None, activation: str, dropout_p: float, seed: Tensor | None, first_row: int
) -> Tensor:
    """The hidden ``[*B, M, N]`` from its pre-activations."""
    act = ACTIVATIONS[canonical_activation(activation)].torch
    hidden = act(up) if gate is None else act(gate) * up
    if dropout_p and seed is not None:
        mask = keep_mask(seed, first_row, hidden[..., 0].numel(), hidden.shape[-1], dropout_p, hidden.dtype)
        return hidden * mask.view(hidden.shape) * (1 / (1 - dropout_p))
    return F.dropout(hidden, dropout_p) if dropout_p else hidden


def ffn_chunked(x: Tensor, *weights_and_biases: Any, chunk_rows: int, **options: Any) -> Tensor:
    """The same FFN, ``chunk_rows`` rows of x ``[M, K]`` at a time: no temporary is larger than one chunk's hidden."""
    residual = options.pop("residual", None)
    y = x.new_empty(x.shape[0], weights_and_biases[1].shape[0])
    for first_row in range(0, x.shape[0], chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        part = None if residual is None else residual[rows]
        y[rows] = ffn(x[rows], *weights_and_biases, residual=part, first_row=first_row, **options)
    return y


@torch.no_grad()
def ffn_chunked_gradients(
    dy: Tensor,
    tensors: tuple[Any, ...],
    wanted: tuple[bool, ...],
    *,
    chunk_rows: int,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of :func:`ffn_chunked` for the wanted ones of x, w_up, w_down, b_up, b_down, w_gate, b_gate.

    The hidden is recomputed chunk by chunk. dx is written chunk by chunk; the other gradients are summed over the
    chunks in at least float32 and rounded once.
    """
    x, w_up, w_down, b_up, _, w_gate, b_gate = tensors
    sums: list[Any] = [
        torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if want else None
        for tensor, want in zip(tensors, wanted, strict=True)
    ]
    if wanted[0]:
        sums[0] = torch.empty_like(x, memory_format=torch.contiguous_format)
    dx, dw_up, dw_down, db_up, db_down, dw_gate, db_gate = sums
    for first_row in range(0, x.shape[0], chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        x_rows, dy_rows = x[rows], dy[rows]
        up = F.linear(x_rows, w_up, b_up).requires_grad_()
        gate = None if w_gate is None else F.linear(x_rows, w_gate, b_gate).requires_grad_()
        with torch.enable_grad():
            hidden = _hidden(up, gate, activation, dropout_p, seed, first_row)
        _add_product(dw_down, dy_rows.T, hidden.detach())
        _add_column_sums(db_down, dy_rows)
        pre_activations = (up,) if gate is None else (up, gate)
        d_up, *d_gate = torch.autograd.grad(hidden, pre_activations, dy_rows @ w_down)
        _add_product(dw_up, d_up.T, x_rows)
        _add_column_sums(db_up, d_up)
        for dz in d_gate:
            _add_product(dw_gate, dz.T, x_rows)
            _add_column_sums(db_gate, dz)
        if dx is not None:
            dx[rows] = torch.addmm(d_up @ w_up, d_gate[0], w_gate) if d_gate else d_up @ w_up
    return [total if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, if wanted; the product is not rounded to the operands' dtype on the way."""
    if total is None:
        return
    if left.dtype != total.dtype and left.is_cuda and type(left) is type(right) is Tensor:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)


def _add_column_sums(total: Tensor | None, dz: Tensor) -> None:
    if total is not None:
        total += dz.sum(0, dtype=total.dtype)
