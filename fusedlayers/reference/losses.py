"""The loss head: a linear layer, and the cross-entropy of its outputs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    # Among probabilities torch refuses any class.
    ignored = ignore_index if classes else -100
    loss = F.cross_entropy(
        scores, flat, weight=weights, reduction=reduction, ignore_index=ignored, label_smoothing=label_smoothing
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
