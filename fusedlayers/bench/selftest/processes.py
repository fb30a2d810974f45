"""Trials in several processes: they compile side by side, and a crash or a hang is that of one trial alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import cast

import torch

from ...devices import describe
from ..cases.trial import Trial
from .running import Outcome, blamed, run

# A process needs about half a GiB on the device for itself.
BYTES_PER_PROCESS = 2**30
MOST_PROCESSES = 16
# Seconds for one trial, with the start of its process and all compilation; beyond them a kernel hangs. Not measured.
LIMIT = 180.0


def process_count(trials: int, device: torch.device) -> int:
    """As many as there are SMs for, and memory on the device."""
    room = torch.cuda.mem_get_info(device)[0] // BYTES_PER_PROCESS
    return max(1, min(trials, os.cpu_count() or 1, MOST_PROCESSES, room))


def run_in_processes(
    trials: Sequence[Trial], device: torch.device, count: int, done: Callable[[Trial, Outcome], None]
) -> None:
    """Calls ``done`` with what came of each trial, in any order."""
    pending, idle = deque(trials), list[_Worker]()
    busy: dict[Connection, _Worker] = {}
    try:
        while pending or busy:
            while pending and len(busy) < count:
                worker = idle.pop() if idle else _Worker(device)
                worker.begin(pending.popleft())
                busy[worker.connection] = worker
            ready = wait(list(busy), timeout=1.0)
            late = [worker for worker in busy.values() if worker.late and worker.connection not in ready]
            for worker in [*(busy[cast(Connection, connection)] for connection in ready), *late]:
                del busy[worker.connection]
                trial, outcome = worker.trial, worker.outcome()
                assert trial is not None
                if outcome.broken:
                    worker.end()
                else:
                    idle.append(worker)
                done(trial, outcome)
    finally:
        for worker in [*idle, *busy.values()]:
            worker.end()


class _Worker:
    """A process, and the trial that it runs."""

    def __init__(self, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.device = device
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.trial: Trial | None = None
        self.deadline = 0.0

    def begin(self, trial: Trial) -> None:
        self.trial, self.deadline = trial, time.monotonic() + LIMIT
        self.connection.send(trial)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def outcome(self) -> Outcome:
        """What the process says, or what its silence means."""
        if not self.connection.poll():
            return self._lost(f"no result after {LIMIT:.0f} seconds")
        try:
            return cast(Outcome, self.connection.recv())
        except (EOFError, ConnectionError):
            self.process.join(timeout=10)
            return self._lost(f"the process ended with exit code {self.process.exitcode}")

    def _lost(self, reason: str) -> Outcome:
        assert self.trial is not None
        plan = self.trial.plan(describe(self.device))
        return Outcome(blamed(plan, None, f"{self.trial}: {reason}"), broken=True)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, device: torch.device) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            trial = connection.recv()
        except EOFError:
            return
        connection.send(run(trial, device))
