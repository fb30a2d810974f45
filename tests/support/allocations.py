"""What the CPU's allocator really hands out: every block, also those that live and die inside one torch operation."""

from __future__ import annotations

import gc
from types import TracebackType

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MANY = 10_000


class AllocatedBytes:
    """While entered, records the blocks of memory that torch's CPU allocator gives and takes back.

    ``blocks``: the bytes of each block; ``peak``: the most bytes there were at once, beyond what there was before.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.peak = 0

    def __enter__(self) -> AllocatedBytes:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        # Of each block's allocation (positive) and of its release (negative).
        sizes = [
            (event.start_ns(), event.nbytes())
            for event in results.events()
            if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
        ]
        del self._profile, results
        # With millions of events they hold gigabytes; to look for garbage after a few takes longer than all else.
        if len(sizes) > MANY:
            gc.collect()
        now = 0
        for _, size in sorted(sizes, key=lambda pair: pair[0]):
            now += size
            self.peak = max(self.peak, now)
            if size > 0:
                self.blocks.append(size)
