"""The memory that a training step saves for its backward pass, counted on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def with_bytes_kept(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What ``forward`` returns, and the bytes that autograd saves for it: whole storages, each once, without
    parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    # The graph keeps all of them alive until the backward pass, so no address is reused.
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return result, sum(storages.values())
