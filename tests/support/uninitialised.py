"""Tensors from the test's own hand where the code under test asks torch for uninitialised ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Allocate = Callable[[torch.Size, torch.dtype, torch.device], Tensor]


def allocate_by(patch: pytest.MonkeyPatch, allocate: Allocate) -> None:
    """Let ``allocate`` make what ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` are asked for."""

    def empty(*size: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        return allocate(_shape(size), dtype or torch.get_default_dtype(), torch.device(device))

    def empty_like(like: Tensor) -> Tensor:
        return allocate(like.shape, like.dtype, like.device)

    original = Tensor.new_empty

    def new_empty(like: Tensor, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        if device is not None:  # Triton's interpreter copies operands
            return original(like, *size, dtype=dtype, device=device)
        return allocate(_shape(size), dtype or like.dtype, like.device)

    patch.setattr(torch, "empty", empty)
    patch.setattr(torch, "empty_like", empty_like)
    patch.setattr(Tensor, "new_empty", new_empty)


def _shape(size: tuple[Any, ...]) -> torch.Size:
    return torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
