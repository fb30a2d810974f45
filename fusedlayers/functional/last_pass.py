"""Whether a backward pass may write over what the forward pass made for it: nobody reads that again, or holds it.

Nobody reads it in the last pass over a graph that is not kept. But hooks of saved tensors may have kept what they were
given, and anybody can ask a node of the graph for its saved tensors: so whoever holds them is counted.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Whether the backward pass that runs may run again (``retain_graph=True``).
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def hooks_are_set() -> bool:
    """Whether hooks get what autograd saves now, and bring something back for it."""
    return _hooks(True) is not None


def _holders(saved: Sequence[Any], place: int) -> tuple[int, ...]:
    """How many hold a tensor, in Python and below it, and its memory; those that count are among them."""
    tensor = saved[place]
    memory = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(memory._cdata)


class _Keeping(torch.autograd.Function):
    """Saves a tensor that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone())
        return x.clone()


def _counted() -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """What is counted of a tensor that autograd alone has kept, and of one that hooks have made anew."""
    try:
        with torch.enable_grad():
            y = _Keeping.apply(torch.empty(1, requires_grad=True, device="cpu"))
        saved = y.grad_fn.saved_tensors
        return _holders(saved, 0), _holders((torch.empty(1, device="cpu"),), 0)
    except AttributeError:
        # Where torch does not count, somebody may hold anything.
        return None, None


_KEPT, _ANEW = _counted()


def may_be_overwritten(saved: Sequence[Tensor | None], first: int, hooked: bool) -> bool:
    """Whether this is the last pass, and nobody holds what was saved from the ``first`` place on.

    ``saved`` is autograd's own tuple; ``hooked``: hooks were set when it was saved.
    """
    if _keeps_graph():
        return False
    alone = _ANEW if hooked else _KEPT
    return all(saved[place] is None or _holders(saved, place) == alone for place in range(first, len(saved)))
