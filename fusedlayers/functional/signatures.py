"""What a call is recognised by, read as cheaply as can be: small calls wait for this, not for the device.

A call that torch runs should cost the host little more than torch's own. So all that a choice of path depends on is
gathered once into a key, and who meets the key again skips the checks and the planning.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import autocast_dtype
from .tracing import traced

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OPTIONS = frozenset({str, bool, int, float, type(None)})

SWITCHES = ("FUSEDLAYERS_BACKEND", "FUSEDLAYERS_STRICT", "FUSEDLAYERS_WORKSPACE_MIB")

# Python decodes a variable of the environment whenever it is read, and raises an error inside where it is not set: half
# a microsecond each. Beneath lies a dictionary, of bytes on POSIX systems.
_environment = os.environ
_beneath: Any = getattr(os.environ, "_data", None)
_keys = tuple(os.fsencode(name) for name in SWITCHES)
if os.name != "posix" or type(_beneath) is not dict or not all(type(key) is bytes for key in _beneath):
    _beneath = None


def switches() -> tuple[object, object, object]:
    """What the environment says of the :data:`SWITCHES`, in whatever form, None where it says nothing."""
    # Somebody may have put another mapping in its place.
    if _beneath is not None and os.environ is _environment:
        backend, strict, workspace = _keys
        return _beneath.get(backend), _beneath.get(strict), _beneath.get(workspace)
    return os.environ.get(SWITCHES[0]), os.environ.get(SWITCHES[1]), os.environ.get(SWITCHES[2])


def input_precision(device: torch.device, dtype: torch.dtype) -> str:
    """``tl.dot``'s precision for these operands: float32 is IEEE unless torch's own matmuls are allowed TF32."""
    if dtype != torch.float32 or device.type != "cuda" or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def transformed() -> bool:
    """Whether this call happens inside a transform of torch.func, or while forward-mode derivatives are taken."""
    # Dual tensors are plain by their type, and need not want a gradient.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def signature(operation: str, tensors: tuple[Tensor | None, ...], *options: object) -> tuple[object, ...] | None:
    """All that the checks and the plan of a call depend on, besides the device's facts and whether a graph is captured.

    None where a call cannot be recognised by that: tensor subclasses, torch.func's and negated tensors, options of
    unusual types, calls that are traced.
    """
    first = tensors[0]
    if first is None or traced() or transformed():
        return None
    found: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        elif type(tensor) in PLAIN_TENSORS and not tensor.is_neg():
            found += (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
        else:
            return None
    # Types too: True equals 1 and 1.0, but not all of them are right.
    types = tuple(map(type, options))
    if not _PLAIN_OPTIONS.issuperset(types):
        return None
    dtype = autocast_dtype(first.device)
    products = dtype or first.dtype
    precision = input_precision(first.device, products) if products is torch.float32 and first.is_cuda else None
    return (operation, *found, *options, types, torch.is_grad_enabled(), dtype, precision, *switches())
