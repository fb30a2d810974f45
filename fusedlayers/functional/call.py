"""The state around a call that decides how it runs, read cheaply, because small calls are host-bound.

A call that torch runs should cost the host little more than torch's own. So everything that the choice of a path
depends on is gathered into a key, and a call with a known key skips checks, planning, and all that follows from shapes
and layouts.
"""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..kernels.launching import ALIGNMENT_MASK
from .operands import autocast_dtype, compute_dtype, input_precision
from .switches import switches

# What torch.cuda's function in Python calls.
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Tensors that stand for plain ones in a trace, and the modes that trace.
_TRACED_TENSORS = (FakeTensor, FunctionalTensor)
_TRACERS = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)
_PLAIN_OPTIONS = frozenset({str, bool, int, float, type(None)})


def observed() -> bool:
    """Whether a dispatch mode sees the operations of this call.

    torch.compile, torch.export, make_fx, FLOP counters, selective checkpointing and modes of users do not see a kernel
    that is launched past torch's dispatcher.
    """
    return bool(_len_torch_dispatch_stack())


def traced() -> bool:
    """Whether this call is traced, so that its tensors hold no data."""
    return observed() and any(isinstance(mode, _TRACERS) for mode in _get_current_dispatch_mode_stack())


def recorded_later() -> bool:
    """Whether torch.compile captures what it compiles now into CUDA graphs (``mode="reduce-overhead"``)."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def captured(device: torch.device) -> bool:
    """Whether this call is being captured into a CUDA graph, or compiled to be."""
    if device.type != "cuda":
        return False
    return recorded_later() if observed() else _is_capturing()


def transformed(*tensors: Tensor | None) -> bool:
    """Whether this call happens inside a transform of torch.func, or while forward-mode derivatives are taken.

    Also whether one of ``tensors`` is a batch of upstream gradients (autograd's ``is_grads_batched``).
    """
    # Dual tensors have a plain type, and need not require a gradient.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return any(tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of these."""
    return is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def subclass_of(*tensors: Tensor | None) -> str:
    """The name of the first tensor subclass among these (DTensor, quantised, ...), or an empty string.

    Tensors of torch.func's transforms and negated views, such as the imaginary part of a conjugate, have a plain type,
    but count as subclasses; so do other layouts than strided.
    """
    if transformed():
        return "tensor of a torch.func transform, or of forward-mode differentiation"
    plain = (*PLAIN_TENSORS, *_TRACED_TENSORS) if observed() else PLAIN_TENSORS
    for tensor in tensors:
        if tensor is not None and type(tensor) not in plain:
            return type(tensor).__name__
        if tensor is not None and tensor.is_neg():
            return "negated view"
        if tensor is not None and tensor.layout is not torch.strided:
            return f"tensor of layout {tensor.layout}"
    return ""


def call_facts(first: Any, *others: Tensor | None) -> dict[str, Any]:
    """The fields of every problem, by name; the ``first`` tensor decides the device, and the dtype of products."""
    dtype = compute_dtype(first)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "input_precision": input_precision(first.device, dtype),
        "captured": captured(first.device),
        "subclass": subclass_of(first, *others),
    }


def with_known_sizes(problem: Any) -> Any:
    """``problem`` with the hints of its SymInts as sizes, which adds no guards.

    A data-dependent size has no hint: the problem is then one for torch.
    """
    symbols = {f.name: getattr(problem, f.name) for f in fields(problem)}
    sizes = {name: value.node for name, value in symbols.items() if isinstance(value, torch.SymInt)}
    if not sizes:
        return problem
    if not all(node.has_hint() for node in sizes.values()):
        return replace(problem, **dict.fromkeys(sizes, 1), subclass="tensor whose size depends on data")
    return replace(problem, **{name: node.hint for name, node in sizes.items()})


def signature(
    operation: str, tensors: tuple[Tensor | None, ...], options: tuple[object, ...]
) -> tuple[object, ...] | None:
    """All that the checks, the plan and the launches of a call depend on, besides the device's facts and addresses.

    None for calls that these do not identify: tensor subclasses, tensors of torch.func, negated views, layouts without
    strides, options of unusual types, calls under a dispatch mode.
    """
    first = tensors[0]
    if first is None or observed() or transformed():
        return None
    found: list[Any] = [operation]
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        if tensor.is_nested:
            return None
        found += (
            tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
            tensor.data_ptr() & ALIGNMENT_MASK,
        )  # fmt: skip
    # Types too: True == 1 == 1.0, but not all of them need be valid.
    types = tuple(map(type, options))
    if not _PLAIN_OPTIONS.issuperset(types):
        return None
    found += (options, types, *surroundings(first))
    return tuple(found)


def surroundings(first: Tensor) -> tuple[object, ...]:
    """What a call depends on besides its arguments: grad mode, autocast, precision, a capture, the user's switches."""
    dtype = autocast_dtype(first.device) if _is_any_autocast_enabled() else None
    precision, recording = None, False
    if first.is_cuda:
        recording = _is_capturing()
        if (dtype or first.dtype) is torch.float32:
            precision = input_precision(first.device, torch.float32)
    return is_grad_enabled(), dtype, precision, recording, switches()
