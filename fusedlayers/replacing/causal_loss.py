"""The loss function of transformers' causal models: whether a function is it, and its parts around the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..modules import class_path
from .remembering import Remembered
from .trials import alike, quietly

# Known by name, so that nothing is imported for it.
_KNOWN = ("transformers.loss.loss_utils", "ForCausalLMLoss")
# Its parameters, in their order.
PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
# Where it does not say which labels to ignore.
IGNORED = -100
_proven: Remembered[bool] = Remembered()


def shifted(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The word that follows each token, ``[*B, tokens]``: nothing follows the last one."""
    if shift_labels is not None:
        return shift_labels
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def divided(loss: Tensor, items: Tensor | int | None) -> Tensor:
    """A sum of losses, divided by the number of items in a batch of which this is a part; a mean as it is."""
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def why_other_loss(function: Any) -> str | None:
    """Why a loss function is not the one that these parts are of, or None."""
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) != _KNOWN:
        name = getattr(function, "__qualname__", None) or class_path(type(function))
        return f"its loss function is {name}, not transformers' {_KNOWN[1]}"
    # What it calls may be another function now.
    around = getattr(function, "__globals__", {}).get("fixed_cross_entropy")
    proven = _proven.get((function, around), lambda: _is_proven(function))
    return None if proven else f"its loss function {_KNOWN[1]} computes something else"


def _is_proven(function: Callable[..., Tensor]) -> bool:
    """Whether the function and its parts agree in losses and gradients, of random numbers."""
    with quietly():
        logits = torch.randn(2, 4, 5, requires_grad=True)
        labels = torch.tensor([[4, 0, IGNORED, 1], [3, 2, 1, 0]])
        cases: tuple[dict[str, Any], ...] = (
            {},
            {"num_items_in_batch": 7},
            {"num_items_in_batch": torch.tensor(3)},
            {"ignore_index": 2},
            {"shift_labels": labels.flip(0)},
        )
        return all(_agree(function, logits, labels, **case) for case in cases)


def _agree(function: Callable[..., Tensor], logits: Tensor, labels: Tensor, **case: Any) -> bool:
    ignored = case.get("ignore_index", IGNORED)
    labels = labels.masked_fill(labels == IGNORED, ignored)
    try:
        theirs = function(logits, labels, logits.shape[-1], **case)
    except Exception:
        return False
    items = case.get("num_items_in_batch")
    target = shifted(labels, case.get("shift_labels"), ignored)
    reduction = "mean" if items is None else "sum"
    ours = divided(reference.cross_entropy(logits, target, reduction=reduction, ignore_index=ignored), items)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (theirs, ours)]
    return alike(theirs, ours) and alike(*gradients)
