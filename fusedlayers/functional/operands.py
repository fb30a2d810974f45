"""Operands of a call: how errors name them, the dtype that products run in, and layouts."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


def describe_tensor(name: str, tensor: Tensor) -> str:
    """How errors describe a tensor argument."""
    return f"{name} of shape {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}"


@contextmanager
def naming_layouts(names: Sequence[str], tensors: Sequence[Any]) -> Iterator[None]:
    """Inside, torch's errors about sparse tensors become errors that name the argument.

    Raises:
        TypeError: torch cannot compute this with the layout of one of these.
    """
    try:
        yield
    except RuntimeError as error:
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None and tensor.layout not in (torch.strided, torch.jagged):
                described = f"{describe_tensor(name, tensor)} has the layout {tensor.layout}"
                reason = "because torch cannot compute this with it"
                raise TypeError(f"{described}: expected torch.strided, {reason}") from error
        raise


@functools.cache
def _autocast_kind(device: torch.device) -> str | None:
    # Cached, because reading a device's type takes time. Some types (meta) have no autocast.
    return device.type if torch.amp.is_autocast_available(device.type) else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives to products on ``device``, or None where it leaves them alone."""
    kind = _autocast_kind(device)
    if kind is None or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that products of ``tensor`` run in: autocast's where it applies (never to float64), else its own."""
    own = tensor.dtype
    return own if own is torch.float64 else autocast_dtype(tensor.device) or own


def autocast(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The floating-point tensors, cast to ``dtype``; gradients flow back in each one's own dtype."""
    # Not Tensor.to, which spends a third of its time on parsing its arguments.
    return [
        tensor if tensor is None or tensor.dtype is dtype or not tensor.is_floating_point() else tensor.type(dtype)
        for tensor in tensors
    ]


class _WithoutAutocast:
    """Turns autocast, which is on, off inside; ``torch.autocast(kind, enabled=False)`` takes five times as long."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._kind, True)


_switched_off = functools.cache(_WithoutAutocast)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: operands are cast once, before a Function, and nothing inside it may cast them again."""
    kind = _autocast_kind(device)
    return _NOTHING if kind is None or not torch.is_autocast_enabled(kind) else _switched_off(kind)


def input_precision(device: torch.device, dtype: torch.dtype) -> str:
    """``tl.dot``'s precision for these operands: float32 is IEEE unless torch's own matmuls are allowed TF32."""
    if dtype != torch.float32 or device.type != "cuda" or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def rows(tensor: Tensor) -> Tensor:
    """``[*B, M, K]`` as a matrix of rows: a view where the strides allow it, else a copy."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def with_leading_dims(matrix: Tensor, tensor: Tensor) -> Tensor:
    """A new matrix ``[rows, N]`` as ``[*B, M, N]`` with the leading dims of ``tensor``, but not as a view.

    Autograd forbids in-place changes of views that were made inside a Function.
    """
    if tensor.dim() == 2:
        return matrix
    return torch.ops.aten._unsafe_view.default(matrix, (*tensor.shape[:-1], matrix.shape[-1]))


def leading_dims(*tensors: Tensor) -> torch.Size:
    """The leading dims ``*batch`` of ``[*batch, rows, columns]`` tensors, which broadcast."""
    first, *others = [tensor.shape[:-2] for tensor in tensors]
    return first if all(each == first for each in others) else torch.broadcast_shapes(first, *others)


def flat_batch(tensor: Tensor, batch: torch.Size) -> Tensor:
    """``[*batch, rows, columns]`` as ``[Z, rows, columns]``, without a copy if all entries share one matrix."""
    if tensor.dim() == 3 and tensor.shape[:1] == batch:
        return tensor
    if all(size == 1 for size in tensor.shape[:-2]):
        return tensor.reshape(1, *tensor.shape[-2:]).expand(math.prod(batch), -1, -1)
    return tensor.expand(*batch, -1, -1).reshape(-1, *tensor.shape[-2:])
