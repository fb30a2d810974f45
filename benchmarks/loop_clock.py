"""The clock of loops: what the host costs where it launches one call after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fusedlayers.bench.timing import Clock, GPUClock


class LoopClock(GPUClock):
    """Wall time of a loop, from an idle device until all of it is done, and the host's part of that.

    The host launches ahead of the device, as in a user's loop. Work of a single call would show the host's start and
    the device's end; work of many calls shows whichever of the two is slower. Some runs come before those that count:
    what the contender before has left in the host's caches, and in modules' memory of their last call, is no part of a
    user's loop.
    """

    def __init__(self, device: torch.device, runs: int = 2, uncounted: int = 3) -> None:
        super().__init__(device)
        self.runs, self.uncounted = runs, uncounted

    def visit(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        measured = []
        with torch.cuda.device(self.device):
            for _ in range(self.uncounted + self.runs):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                launched = time.perf_counter()
                torch.cuda.synchronize()
                measured.append((time.perf_counter() - start, launched - start))
        return measured[self.uncounted :]


def loop_clock_for(device: torch.device, runs: int = 2, uncounted: int = 3) -> Clock:
    """The clock of loops on a device."""
    return LoopClock(device, runs, uncounted) if device.type == "cuda" else Clock()
