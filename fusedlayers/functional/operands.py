"""Operands of a call: checks that name the argument, the dtype that products run in, and layouts."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


def said(name: str, tensor: Tensor) -> str:
    """How errors describe a tensor argument."""
    return f"{name} of shape {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}"


def check_given(**tensors: Tensor | None) -> None:
    """Checks that required operands are not None."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor, got None")


def check_layout(name: str, tensor: Tensor) -> None:
    """Checks that a tensor is strided.

    Raises:
        TypeError: it is nested or sparse.
    """
    # A nested tensor has no shape to print.
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor ({tensor.layout}): expected a plain tensor, padded or packed")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{said(name, tensor)} has the layout {tensor.layout}: expected torch.strided")


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
                raise TypeError(
                    f"{said(name, tensor)} has the layout {tensor.layout}: expected torch.strided, because torch "
                    f"cannot compute this with it"
                ) from error
        raise


def check_tensors(tensors: dict[str, Tensor | None], sparse: tuple[str, ...] = ()) -> None:
    """Checks that tensors are floating-point, on the device of the first, and of its dtype unless autocast casts them.

    ``sparse`` names those that may be sparse: torch judges their layout, in :func:`naming_layouts`.

    Raises:
        TypeError: not a tensor, nested or sparse, not a real floating dtype, or dtypes that differ outside autocast.
        ValueError: different devices.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor is None or first is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or name not in sparse:
            check_layout(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(f"{said(name, tensor)}: expected a real floating-point dtype")
        if tensor.device != first.device:
            raise ValueError(f"{said(name, tensor)}: expected the device of {first_name}, {first.device}")
        mixed = tensor.dtype != first.dtype
        if mixed and not (autocast_dtype(first.device) and torch.float64 not in (tensor.dtype, first.dtype)):
            raise TypeError(f"{said(name, tensor)}: expected the dtype of {first_name}, {first.dtype}")


def check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...], letters: str, because: str) -> None:
    """Checks the shape of ``tensor``; None passes."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"{said(name, tensor)}: expected {letters} = {list(expected)} {because}")


def check_width(name: str, x: Tensor, letters: str, weight_name: str, weight: Tensor, axis: int = -1) -> None:
    """Checks that x has as many columns as this ``axis`` of its weight.

    The error names x, because the weight of a module is what its author asked for.
    """
    if x.shape[-1] == weight.shape[axis]:
        return
    other = weight.shape[-1 if axis == -2 else -2]
    hint = f", unless {weight_name} is meant to be transposed" if other == x.shape[-1] else ""
    raise ValueError(
        f"{said(name, x)}: expected {letters} with K = {weight.shape[axis]}, as {weight_name} is "
        f"{list(weight.shape)}{hint}"
    )


def check_bias(bias: bool) -> None:
    """Checks that ``bias``, whether the sum over the rows is wanted, is a bool and not a tensor."""
    if not isinstance(bias, bool):
        raise TypeError(f"bias must be True or False, got {type(bias).__name__}")


def checked_flag(name: str, value: Any) -> bool:
    """``True`` or ``False``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def checked_number(name: str, value: Any, expected: str, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number between two bounds, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return float(value)


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
