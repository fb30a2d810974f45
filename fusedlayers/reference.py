"""Each operation in a few lines of torch: the specification, the oracle in float64, the CPU path, and the baseline."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.dropout import keep_mask


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """``act(a @ b) @ c``: a ``[*B, M, K]``, b ``[*B, K, N]``, c ``[*B, N, O]`` -> ``[*B, M, O]``; any dtype."""
    return _batched_product(ACTIVATIONS[canonical_activation(activation)].torch(_batched_product(a, b)), c)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    split_k: int | str = "auto",
    reduction: str = "workspace",
) -> Tensor:
    """``act(x Wᵀ + b)``: x ``[*B, M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[*B, M, N]``; any dtype.

    ``split_k`` and ``reduction`` change nothing here.
    """
    return ACTIVATIONS[canonical_activation(activation)].torch(F.linear(x, weight, bias))


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
    # A meta tensor has no lengths: none is longer than all of them together.
    longest = packed.shape[0] if packed.is_meta else int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=packed.device) < lengths[:, None]
    return packed.new_zeros(*mask.shape, packed.shape[-1]).index_put((mask,), packed), mask


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, which broadcasts: views that cost the host more than a small product costs the device."""
    alike = left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0]
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
    atomic: bool = False,
) -> Any:
    """``⊕ act(a @ b + bias)`` over ``dim``: a ``[*B, M, K]``, b ``[*B, K, N]`` -> ``[*B, N]`` or ``[*B, M]``.

    What does not take part is filled with the identity of the operation. ``atomic`` changes nothing here.
    """
    c = _batched_product(a, b)
    c = ACTIVATIONS[canonical_activation(activation)].torch(c if bias is None else c + bias)
    values = {"absmax": torch.abs, "sumsq": torch.square}.get(op, lambda values: values)(c)
    count: Any = c.shape[dim]
    if mask is not None or lengths is not None:
        taking = _taking_part(mask, lengths, c.shape[dim], c.device)
        fill = 0.0 if op in ("sum", "mean", "sumsq") else torch.inf if op in ("min", "argmin") else -torch.inf
        values = values.masked_fill(~taking.unsqueeze(-1 if dim == -2 else -2), fill)
        count = taking.sum(-1, keepdim=True)
    if op == "logsumexp":
        found: Any = values.logsumexp(dim)
    elif op in ("sum", "sumsq"):
        found = values.sum(dim)
    elif op == "mean":
        # Divided before it is rounded: a sum may overflow where its mean does not.
        summed = values.sum(dim, dtype=torch.promote_types(c.dtype, torch.float32))
        found = (summed / count).to(c.dtype)
    elif op in ("argmax", "argmin"):
        found = getattr(values, op.removeprefix("arg"))(dim).indices
    else:
        best = values.min(dim) if op == "min" else values.max(dim)
        found = tuple(best) if return_indices else best.values
    if return_product:
        return (*found, c) if isinstance(found, tuple) else (found, c)
    return found


def _taking_part(mask: Tensor | None, lengths: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Which rows are reduced: boolean, ``[..., rows]``, broadcasts to ``[*B, rows]``."""
    if lengths is None:
        assert mask is not None
        # One value for all rows counts as often as there are rows.
        return mask.expand(*mask.shape[:-1], rows)
    taking = torch.arange(rows, device=device) < lengths.unsqueeze(-1)
    return taking if mask is None else taking & mask


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
    # A sum of float16 values may overflow where its product with b does not: half of its scale is taken out before. A
    # mean has the scale of its values.
    scale = 2.0 ** (rows.shape[-2].bit_length() // 2) if rows.dtype == torch.float16 and not mean else 1.0
    total = total / some if mean else total / scale
    found = (_batched_product(total.to(rows.dtype).unsqueeze(-2), other)).squeeze(-2) * scale
    if bias is not None and dim == -2:
        found = found + (bias if mean else bias * count)
    elif bias is not None:
        taken = bias if isinstance(count, int) else bias * taking
        summed = taken.sum(-1, keepdim=True, dtype=total.dtype)
        found = found + (summed / some if mean else summed).to(found.dtype)
    # The mean of nothing is NaN, and its gradients are 0.
    return torch.where(count > 0, found, torch.nan) if mean and not isinstance(count, int) else found


def hidden_gradient(
    dy: Tensor,
    w_down: Tensor,
    z: Tensor,
    z_gate: Tensor | None = None,
    *,
    activation: str | None,
    bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(dy W_down) ⊙ act'(z)``, with a gate the gradients of ``act(z_gate) ⊙ z``; and with ``bias`` their sums.

    dy ``[*B, M, O]``, w_down ``[O, N]``, z and z_gate ``[*B, M, N]`` -> dz, dz_gate like z, db_up, db_gate ``[N]``.
    """
    act = ACTIVATIONS[canonical_activation(activation)].torch
    d_hidden = dy @ w_down
    if z_gate is None:
        return _summed(_through(act, z, d_hidden), None, bias)
    return _summed(d_hidden * act(z_gate), _through(act, z_gate, d_hidden * z), bias)


def _through(act: Any, z: Tensor, gradient: Tensor) -> Tensor:
    """``gradient ⊙ act'(z)``, as autograd has it, and to be differentiated again."""
    pull: Any = torch.func.vjp(act, z)[1]
    return pull(gradient)[0]


def _summed(
    dz: Tensor, dz_gate: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Both, and with ``bias`` their sums over all rows."""
    sums = (
        None if t is None or not bias else t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).sum(0) for t in (dz, dz_gate)
    )
    db_up, db_gate = sums
    return dz, dz_gate, db_up, db_gate


def weight_gradient(dy: Tensor, x: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """``dyᵀ x`` and the sum of dy over its rows: dy ``[*B, M, O]``, x ``[*B, M, K]`` -> ``[O, K]``, ``[O]``; any dtype.

    The gradients of a linear layer's weight and bias, ``y = x Wᵀ + b``; None for the second without ``bias``.
    """
    dy, x = (tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]) for tensor in (dy, x))
    return dy.T @ x, dy.sum(0) if bias else None


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
    values = hidden(up, gate, activation=activation, dropout_p=dropout_p, seed=seed, first_row=first_row)
    y = F.linear(values, w_down, b_down)
    return y if residual is None else y + residual


def hidden(
    up: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    first_row: int = 0,
) -> Tensor:
    """``dropout(act(up))``, or with a gate ``act(gate) ⊙ up``: the hidden of an FFN from its pre-activations.

    All ``[*B, M, N]``; dropout as in :func:`ffn`.
    """
    act = ACTIVATIONS[canonical_activation(activation)].torch
    values = act(up) if gate is None else act(gate) * up
    if dropout_p and seed is not None:
        mask = keep_mask(seed, first_row, values[..., 0].numel(), values.shape[-1], dropout_p, values.dtype)
        return values * mask.view(values.shape) * (1 / (1 - dropout_p))
    return F.dropout(values, dropout_p) if dropout_p else values


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
            values = hidden(up, gate, activation=activation, dropout_p=dropout_p, seed=seed, first_row=first_row)
        _add_product(dw_down, dy_rows.T, values.detach())
        _add_column_sums(db_down, dy_rows)
        pre_activations = (up,) if gate is None else (up, gate)
        d_up, *d_gate = torch.autograd.grad(values, pre_activations, dy_rows @ w_down)
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
