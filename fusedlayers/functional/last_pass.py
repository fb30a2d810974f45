"""Whether a backward pass may overwrite the tensors that the forward pass saved for it.

It may if the graph is not retained and nobody else holds them. Saved-tensor hooks may have kept what they were given,
and anybody can read the saved tensors of a graph node, so references are counted.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Whether the running backward pass retains its graph (``retain_graph=True``).
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def hooks_are_set() -> bool:
    """Whether default saved-tensor hooks are active."""
    return _hooks(True) is not None


def _holders(saved: Sequence[Any], place: int) -> tuple[int, ...]:
    """Reference counts of a tensor in Python and in C++, and of its storage, including those of counting itself."""
    tensor = saved[place]
    memory = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(memory._cdata)


class _Keeping(torch.autograd.Function):
    """Saves a tensor that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone())
        return x.clone()


def _counted() -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """:func:`_holders` of a tensor that only autograd holds, and of a new one, as hooks may return it."""
    try:
        with torch.enable_grad():
            y = _Keeping.apply(torch.empty(1, requires_grad=True, device="cpu"))
        saved = y.grad_fn.saved_tensors
        return _holders(saved, 0), _holders((torch.empty(1, device="cpu"),), 0)
    except AttributeError:
        # This torch does not count: somebody may hold the tensors.
        return None, None


_KEPT, _ANEW = _counted()


def may_be_overwritten(saved: Sequence[Tensor | None], first: int, hooked: bool) -> bool:
    """Whether the graph is not retained, and nobody else holds the saved tensors from index ``first`` on.

    ``saved`` is autograd's own tuple; ``hooked``: saved-tensor hooks were active when it was saved.
    """
    if _keeps_graph():
        return False
    alone = _ANEW if hooked else _KEPT
    return all(saved[place] is None or _holders(saved, place) == alone for place in range(first, len(saved)))
