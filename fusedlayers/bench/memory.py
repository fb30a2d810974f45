"""What a contender keeps for its backward pass, and how much memory it needs at most."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.switches import switched
from .contenders import Contender
from .work import Work


def saved_bytes(contender: Contender, work: Work, parameters: frozenset[str]) -> int | None:
    """Bytes that the forward pass saves for the backward pass: whole storages, each once, without the parameters.

    None for a contender of which autograd does not save what is kept.
    """
    if not contender.saves:
        return None
    owned = {work.inputs[name].untyped_storage().data_ptr() for name in parameters & set(work.inputs)}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with switched(contender.switches), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # The results keep the saved tensors alive until all are counted, so no address is used twice.
        results = contender.call(**work.inputs)
    del results
    return sum(storages.values())


def peak_bytes(contender: Contender, work: Work) -> int | None:
    """The most memory the work allocates beyond its inputs and upstream gradient; None on a CPU."""
    device = work.device
    if device.type != "cuda":
        return None
    with switched(contender.switches):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work.run(contender.call)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
