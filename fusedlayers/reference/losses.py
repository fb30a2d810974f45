"""The loss head: a linear layer, and the cross-entropy of its outputs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's default for ignore_index.
IGNORED = -100


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    """:func:`cross_entropy` of ``input linear_weightᵀ + linear_bias`` and the target.

    input ``[*B, K]``, linear_weight ``[V, *D, K]``, linear_bias ``[V, *D]``; the product is rounded to the operands'
    dtype.
    """
    classes = linear_weight.shape[:-1]
    out_features = classes[1:]
    if out_features:
        linear_weight = linear_weight.flatten(0, -2)
        linear_bias = None if linear_bias is None else linear_bias.flatten()
    product = F.linear(input, linear_weight, linear_bias)
    if out_features:
        product = product.unflatten(-1, classes)
    return cross_entropy(
        product, target, out_features=out_features, weight=weight, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
    )  # fmt: skip


def cross_entropy(
    product: Tensor,
    target: Tensor,
    *,
    out_features: Sequence[int] = (),
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    """torch's cross-entropy of :func:`logits`, and ``z_loss · logsumexp(logits)²`` for each token that counts.

    product ``[*B, V]``, weight ``[V]``, in any dtype; target holds classes ``[*B]`` or probabilities ``[*B, V]``. With
    ``out_features`` D a token has a loss at each of ΠD positions: product ``[*B, V, *D]``, target ``[*B, *D]``
    or ``[*B, V, *D]``. The result is a scalar, or ``[*B, *D]`` without a reduction, in at least 32 bits.
    """
    classes = not target.is_floating_point()
    if out_features:
        # Make each position a row of its own.
        product = product.flatten(-len(out_features)).transpose(-1, -2)
        if not classes:
            target = target.flatten(-len(out_features)).transpose(-1, -2)
    ignored = IGNORED if ignore_index is None else ignore_index
    scores = product if product.dim() == 2 else product.reshape(math.prod(product.shape[:-1]), product.shape[-1])
    scores = logits(scores, softcap, logit_scale)
    flat = target.reshape(-1).to(torch.int64) if classes else target.reshape(scores.shape).to(scores.dtype)
    weights = None if weight is None else weight.to(scores.dtype)
    loss = F.cross_entropy(
        scores, flat, weight=weights, reduction=reduction, ignore_index=ignored, label_smoothing=label_smoothing
    )
    if z_loss:
        squares = z_loss * scores.logsumexp(-1).square()
        counted: Any = flat.shape[0]
        if classes:
            counts = flat != ignored
            squares = squares.masked_fill(~counts, 0)
            counted = counts.sum() if weights is None else (weights[flat.where(counts, 0)] * counts).sum()
        total = squares if reduction == "none" else squares.sum()
        loss = loss + (total / counted if reduction == "mean" else total)
    if reduction != "none":
        return loss
    leading = product.shape[:-2] if out_features else product.shape[:-1]
    return loss.reshape((*leading, *out_features))


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
) -> Any:
    """The log-probability of each target, and on request the entropy of each token's distribution and its likeliest
    class.

    input ``[*B, K]``, linear_weight ``[V, K]``, linear_bias ``[V]``, in any dtype, target ``[*B]`` -> ``[*B]`` in at
    least 32 bits, and int64 classes. The first two are 0 where the target is ``ignore_index``.
    """
    scores = logits(F.linear(input, linear_weight, linear_bias), softcap, logit_scale)
    logarithms = scores.log_softmax(-1)
    target = target.to(torch.int64)
    ignored = target == (IGNORED if ignore_index is None else ignore_index)
    chosen = logarithms.gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0)
    found = [chosen]
    if return_entropy:
        # A class of probability 0 must add 0, but 0 · -inf is NaN.
        terms = logarithms.exp() * logarithms.masked_fill(logarithms == -torch.inf, 0)
        found.append(-terms.sum(-1).masked_fill(ignored, 0))
    if return_argmax:
        found.append(scores.argmax(-1))
    return tuple(found) if len(found) > 1 else chosen


def logits(product: Tensor, softcap: float | None = None, logit_scale: float = 1.0) -> Tensor:
    """``softcap · tanh(logit_scale · product / softcap)``, or ``logit_scale · product``, in at least 32 bits."""
    scores = product.to(torch.promote_types(product.dtype, torch.float32))
    if logit_scale != 1:
        scores = scores * logit_scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
