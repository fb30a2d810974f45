"""A step recorded into a CUDA graph: its replays give what the same step gives when launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[], tuple[Tensor, ...]]


def recorded(step: Step) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """The graph of one call of ``step``, and the tensors that a replay fills."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    return graph, replayed


def assert_replays_like_launched(step: Step, drawn: Sequence[Tensor], replays: int) -> None:
    """Warms ``step`` up, records it, and compares replays bit for bit, with new random data in ``drawn`` each time."""
    step()
    graph, replayed = recorded(step)
    for _ in range(replays):
        with torch.no_grad():
            for tensor in drawn:
                tensor.copy_(torch.randn_like(tensor) / 8)
        graph.replay()
        now = [tensor.clone() for tensor in replayed]
        for ours, launched in zip(now, step(), strict=True):
            assert torch.equal(ours, launched)
            assert bool(ours.any())
