"""Whether a backward pass may overwrite the tensors that the forward pass saved for it.

It may if the graph is not retained and nobody else holds them. Saved-tensor hooks may have kept what they were given,
and anybody can read the saved tensors of a graph node, so references are counted.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.torch_internals import keeps_graph, references, saved_tensor_hooks


def hooks_are_set() -> bool:
    """Whether default saved-tensor hooks are active."""
    return saved_tensor_hooks(True) is not None


def _holders(saved: Sequence[Any], place: int) -> tuple[int, ...] | None:
    """Reference counts of a tensor in Python and in C++, and of its storage, including those of counting itself.

    None where torch does not count.
    """
    tensor = saved[place]
    counts = references(tensor)
    return None if counts is None else (sys.getrefcount(tensor), *counts)


class _Saving(torch.autograd.Function):
    """Saves a tensor that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone())
        return x.clone()


def _counted() -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """:func:`_holders` of a tensor that only autograd holds, and of a new one, as hooks may return it."""
    with torch.enable_grad():
        y = _Saving.apply(torch.empty(1, requires_grad=True, device="cpu"))
    saved = y.grad_fn.saved_tensors
    return _holders(saved, 0), _holders((torch.empty(1, device="cpu"),), 0)


_SAVED, _FROM_HOOK = _counted()


def may_be_overwritten(saved: Sequence[Tensor | None], first: int, hooked: bool) -> bool:
    """Whether the graph is not retained, and nobody else holds the saved tensors from index ``first`` on.

    ``saved`` is autograd's own tuple; ``hooked``: saved-tensor hooks were active when it was saved.
    """
    alone = _FROM_HOOK if hooked else _SAVED
    if alone is None or keeps_graph():
        return False
    return all(saved[place] is None or _holders(saved, place) == alone for place in range(first, len(saved)))
