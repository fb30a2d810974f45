"""The state around a call that decides how it runs, read cheaply, because small calls are host-bound.

A call that torch runs should cost the host little more than torch's own. So everything that the choice of a path
depends on is guarded, and a call like an earlier one skips checks and planning: see ``recalling``.
"""

import sys
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..kernels.torch_internals import (
    any_autocast,
    count_dispatch_modes,
    in_functorch,
    is_batch_of_gradients,
    is_capturing,
    jit_trace,
)
from .operands import autocast_dtype, compute_dtype, input_precision
from .switches import switches

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Tensors that stand for plain ones in a trace, and the modes that trace.
_TRACED_TENSORS = (FakeTensor, FunctionalTensor)
_TRACERS = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


def observed() -> bool:
    """Whether a dispatch mode sees the operations of this call.

    torch.compile, torch.export, make_fx, FLOP counters, selective checkpointing and modes of users do not see a kernel
    that is launched past torch's dispatcher.
    """
    return bool(count_dispatch_modes())


def traced() -> bool:
    """Whether this call is traced, so that its tensors hold no data."""
    return observed() and any(isinstance(mode, _TRACERS) for mode in _get_current_dispatch_mode_stack())


def plain_types() -> tuple[type[Tensor], ...]:
    """The types of plain tensors, and in a trace of those that stand for them."""
    return (*PLAIN_TENSORS, *_TRACED_TENSORS) if observed() else PLAIN_TENSORS


def captured(device: torch.device) -> bool:
    """Whether this call is being captured into a CUDA graph, or compiled to be (``mode="reduce-overhead"``)."""
    if device.type != "cuda":
        return False
    if not observed():
        return is_capturing()
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether this call happens inside a transform of torch.func, or while forward-mode derivatives are taken.

    Also whether one of ``tensors`` is a batch of upstream gradients (autograd's ``is_grads_batched``).
    """
    if in_functorch() or forward_ad._current_level >= 0:
        return True
    for tensor in tensors:  # noqa: SIM110  a generator takes longer
        if tensor is not None and is_batch_of_gradients(tensor):
            return True
    return False


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
    plain = plain_types()
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


def surroundings(first: Tensor) -> tuple[bool, torch.dtype | None, str | None, bool, tuple[object, ...]] | None:
    """What a call depends on besides its arguments: grad mode, autocast, precision, a capture, the user's switches.

    None in dispatch modes, in transforms and in a trace of torch.jit: such calls are checked and planned each time.
    """
    if count_dispatch_modes() or transformed() or jit_trace() is not None:
        return None
    dtype = autocast_dtype(first.device) if any_autocast() else None
    precision, capturing = None, False
    if first.is_cuda:
        capturing = is_capturing()
        if (dtype or first.dtype) is torch.float32:
            precision = input_precision(first.device, torch.float32)
    return is_grad_enabled(), dtype, precision, capturing, switches()
