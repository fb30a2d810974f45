"""Each operation in a few lines of torch: the specification, the oracle in float64, the CPU path, and the baseline."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.dropout import keep_mask, limit_and_scale


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
    if not _jit_tracing() and documents.shape[1] == 0:
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
    # A meta tensor has no lengths, and torch.jit's graph will get others: none is longer than all of them together.
    longest = packed.shape[0] if packed.is_meta or _jit_tracing() else int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=packed.device) < lengths[:, None]
    return packed.new_zeros(*mask.shape, packed.shape[-1]).index_put((mask,), packed), mask


def _jit_tracing() -> bool:
    return torch._C._get_tracing_state() is not None


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, which broadcasts: views that cost the host more than a small product costs the device."""
    # torch.jit would write the comparison down, and warn.
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
    act = ACTIVATIONS[canonical_activation(activation)]
    d_hidden = dy @ w_down
    if z_gate is None:
        return _summed(act.gradient(d_hidden, z), None, bias)
    return _summed(d_hidden * act.torch(z_gate), act.gradient(d_hidden * z, z_gate), bias)


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
) -> Tensor:
    """``dropout(act(x W_upᵀ + b_up)) W_downᵀ + b_down + residual``.

    With a gate the hidden is ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)``. Shapes: x ``[*B, M, K]``, w_up and w_gate
    ``[N, K]``, w_down ``[O, N]``, residual and result ``[*B, M, O]``; any dtype. Dropout draws from torch's generator;
    with ``seed`` it replays the kernels' mask instead.
    """
    up = F.linear(x, w_up, b_up)
    gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
    values = dropped(hidden(up, gate, activation=activation), dropout_p, seed)
    y = F.linear(values, w_down, b_down)
    return y if residual is None else y + residual


def lora_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    *,
    activation: str = "gelu",
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    gate_scale: float = 1.0,
) -> Tensor:
    """:func:`ffn` whose linear layers compute ``x Wᵀ + b + scale (x Aᵀ) Bᵀ``: A ``[R, in]``, B ``[out, R]``."""
    up = _adapted(x, w_up, b_up, up_a, up_b, up_scale)
    gate = None if w_gate is None else _adapted(x, w_gate, b_gate, gate_a, gate_b, gate_scale)
    return _adapted(hidden(up, gate, activation=activation), w_down, b_down, down_a, down_b, down_scale)


def _adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if a is None or b is None else torch.add(y, F.linear(F.linear(x, a), b), alpha=scale)


def dropped(values: Tensor, dropout_p: float, seed: Tensor | None, place: tuple[int, int] = (0, 0)) -> Tensor:
    """The hidden ``[*B, M, N]`` after dropout; with ``seed`` by the kernels' mask from row and column ``place`` on."""
    if dropout_p and seed is not None:
        first_row, first_column = place
        rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
        mask = keep_mask(seed, first_row, rows, columns, dropout_p, values.dtype, first_column)
        return values * mask.view(values.shape) * limit_and_scale(dropout_p)[1]
    return F.dropout(values, dropout_p) if dropout_p else values


def hidden(up: Tensor, gate: Tensor | None = None, *, activation: str) -> Tensor:
    """``act(up)``, or with a gate ``act(gate) ⊙ up``: the hidden of an FFN from its pre-activations ``[*B, M, N]``."""
    act = ACTIVATIONS[canonical_activation(activation)].torch
    return act(up) if gate is None else act(gate) * up


def moe_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_and_up: str = "separate",
    transposed: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """``Σ_j top_k_weights[m, j] · ffn_e(x[m])`` with ``e = top_k_index[m, j]``: a loop over experts; any dtype.

    x ``[*B, M, K]``, index and weights ``[*B, M, k]``, weights ``[E, out, in]`` in the layout that ``gate_and_up`` and
    ``transposed`` name. An index that is no expert adds nothing.
    """
    if transposed:
        w_up, w_down, w_gate = w_up.mT, w_down.mT, None if w_gate is None else w_gate.mT
    tokens = x.reshape(-1, x.shape[-1])
    index, weights = (each.reshape(tokens.shape[0], each.shape[-1]) for each in (top_k_index, top_k_weights))
    y = torch.zeros_like(tokens, dtype=torch.promote_types(x.dtype, top_k_weights.dtype))
    for expert in range(w_up.shape[0]):
        token, place = torch.where(index == expert)
        b_up_one, b_down_one = (None if bias is None else bias[expert] for bias in (b_up, b_down))
        up, gate = split_gate_and_up(F.linear(tokens[token], w_up[expert], b_up_one), gate_and_up)
        if w_gate is not None:
            gate = F.linear(tokens[token], w_gate[expert], None if b_gate is None else b_gate[expert])
        h = clamped_hidden(up, gate, activation=activation, limit=limit, up_offset=up_offset)
        found = F.linear(h, w_down[expert], b_down_one)
        y = y.index_add(0, token, found * weights[token, place].unsqueeze(-1))
    return y.to(x.dtype).reshape(x.shape)


def split_gate_and_up(merged: Tensor, gate_and_up: str) -> tuple[Tensor, Tensor | None]:
    """(up, gate) from the last dimension of ``merged``, or merged itself, without a gate, where they are separate."""
    if gate_and_up == "separate":
        return merged, None
    gate, up = (merged[..., ::2], merged[..., 1::2]) if gate_and_up == "interleaved" else merged.chunk(2, -1)
    return up, gate


def clamped_hidden(
    up: Tensor, gate: Tensor | None, *, activation: str, limit: float | None = None, up_offset: float = 0.0
) -> Tensor:
    """``act(min(gate, limit)) ⊙ (clamp(up, -limit, limit) + up_offset)``; without a gate ``act(up)``."""
    if limit is not None and gate is not None:
        up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
    return hidden(up + up_offset if up_offset else up, gate, activation=activation)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    """:func:`cross_entropy` of ``input linear_weightᵀ + linear_bias`` and the target.

    input ``[*B, K]``, linear_weight ``[V, K]``, linear_bias ``[V]``; the product is rounded to their dtype.
    """
    return cross_entropy(
        F.linear(input, linear_weight, linear_bias), target, weight=weight, reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale,
        z_loss=z_loss,
    )  # fmt: skip


def cross_entropy(
    product: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    """torch's cross-entropy of :func:`logits`, and ``z_loss · logsumexp(logits)²`` for each token that counts.

    product ``[*B, V]``, weight ``[V]``; target holds classes ``[*B]`` or probabilities ``[*B, V]``. The result has at
    least 32 bits: a scalar, or ``[*B]`` without a reduction; any dtype.
    """
    scores = product if product.dim() == 2 else product.reshape(math.prod(product.shape[:-1]), product.shape[-1])
    scores = logits(scores, softcap, logit_scale)
    classes = not target.is_floating_point()
    flat = target.reshape(-1) if classes else target.reshape(scores.shape).to(scores.dtype)
    weights = None if weight is None else weight.to(scores.dtype)
    loss = F.cross_entropy(
        scores, flat, weight=weights, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if z_loss:
        squares = z_loss * scores.logsumexp(-1).square()
        counted: Any = flat.shape[0]
        if classes:
            taking = flat != ignore_index
            squares = squares.masked_fill(~taking, 0)
            counted = taking.sum() if weights is None else (weights[flat.where(taking, 0)] * taking).sum()
        total = squares if reduction == "none" else squares.sum()
        loss = loss + (total / counted if reduction == "mean" else total)
    return loss.reshape(product.shape[:-1]) if reduction == "none" else loss


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
) -> Any:
    """The logarithm of each target's probability by :func:`logits`, and the entropy of each token's distribution.

    input ``[*B, K]``, linear_weight ``[V, K]``, linear_bias ``[V]``, target ``[*B]`` -> ``[*B]``, at least 32 bits; any
    dtype. Both are 0 where the target is ``ignore_index``.
    """
    logarithms = logits(F.linear(input, linear_weight, linear_bias), softcap, logit_scale).log_softmax(-1)
    ignored = target == ignore_index
    chosen = logarithms.gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0)
    if not return_entropy:
        return chosen
    # What has no probability adds nothing: 0 · -inf is 0 here.
    terms = logarithms.exp() * logarithms.masked_fill(logarithms == -torch.inf, 0)
    return chosen, -terms.sum(-1).masked_fill(ignored, 0)


def logits(product: Tensor, softcap: float | None = None, logit_scale: float = 1.0) -> Tensor:
    """``softcap · tanh(logit_scale · product / softcap)``, or ``logit_scale · product``, in at least 32 bits."""
    scores = product.to(torch.promote_types(product.dtype, torch.float32))
    if logit_scale != 1:
        scores = scores * logit_scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
