"""The names of torch that the call path relies on although they are not public. No other file there uses one.

All of them are in torch 2.11 (seen on GPUs) and 2.13 (seen on CPUs); ``tests/functional/test_torch_internals.py`` calls
each of them, so that another release which lacks one is noticed there. Without those that only save time calls run the
same, but slower, as the comments below say.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("fusedlayers")

# What Python's functions of similar names call, but for checks that are not needed where a tensor is on a GPU. Builds
# of torch for CPUs lack some.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

# The state of this thread: how many dispatch modes there are, whether torch.func transforms are active, and whether
# autocast is on for any type of device.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Whether a tensor is a batch of upstream gradients (``is_grads_batched``).
is_batch_of_gradients: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor
# The graph that torch.jit.trace is recording, or None.
jit_trace: Callable[[], Any] = torch._C._get_tracing_state
# Whether a hook for all modules is registered.
has_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook

# Whether the running backward pass retains its graph; default hooks on saved tensors, or None. Where these or the
# counts of :func:`references` are missing, no backward pass overwrites what the forward pass saved.
keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True
)


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """torch.compile's guard on tensors: class, dispatch keys, dtype, device, ``requires_grad``, sizes, strides.

    The guard takes other tensors one by one, and reads them in C++. Dispatch keys include those of the thread:
    autocast, transforms, modes. None where it does not hold for ``tensors`` themselves. Under a torch without such
    guards it is always None: every call is checked and planned anew, and one warning says so.
    """
    kind = _tensor_guards()
    if kind is None:
        return None
    check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if check(*tensors) else None


@cache
def _tensor_guards() -> Any:
    found = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if found is None:
        _log.warning("torch %s has no TensorGuards: every call is checked and planned anew", torch.__version__)
    return found


def autograd_in_reach() -> AbstractContextManager[Any]:
    """A context in which autograd works even inside a custom operation, where its dispatch keys are excluded."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD)
    return guard


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


@cache
def kernels_are_next(keys: int) -> bool:
    """Whether nothing comes between autograd and the kernels of a device: no mode, no transform, no subclass.

    ``keys``: the dispatch keys of an operation that autograd's formula is called with.
    """
    later = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset
    for passed in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.BackendSelect):
        later = later.remove(passed)
    return later.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def references(tensor: Any) -> tuple[int, int] | None:
    """How many references C++ holds to a tensor, and to its storage; None where this torch does not count them."""
    try:
        return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    except AttributeError:
        return None
