"""Rows measured in several processes: they compile side by side, and each is timed while it has the GPU for itself."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

Found = TypeVar("Found")

# Of this process, where it is one of several.
_turns: Turns | None = None


class Turns:
    """Who has the GPU: any number of processes that share it, or one alone. Whoever asked first comes first."""

    def __init__(self, context: Any, processes: int) -> None:
        self._asking, self._processes, self._shares = context.Lock(), processes, context.Semaphore(processes)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While nobody is timed."""
        with self._asking:
            self._shares.acquire()
        try:
            yield
        finally:
            self._shares.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else runs anything but what a compiler tries."""
        with self._asking:
            for _ in range(self._processes):
                self._shares.acquire()
        try:
            yield
        finally:
            for _ in range(self._processes):
                self._shares.release()


def turns() -> Turns | None:
    """Those of this process, or None where it has the GPU for itself all the time."""
    return _turns


def _begin(given: Turns) -> None:
    global _turns
    _turns = given
    # The processes keep all cores busy; a compiler with processes of its own would add as many to each.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def measured(
    measure: Callable[..., Found], jobs: Iterable[tuple[Any, ...]], processes: int
) -> Iterator[tuple[tuple[Any, ...], Found]]:
    """(a job, ``measure(*job)``) for every job, as they are done; ``measure`` and jobs can be pickled."""
    if processes == 1:
        for job in jobs:
            yield job, measure(*job)
        return
    # A forked process could not use the GPU.
    context = multiprocessing.get_context("spawn")
    given = Turns(context, processes)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(given,)) as pool:
        running = {pool.submit(measure, *job): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()
