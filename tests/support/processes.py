"""Two processes that are joined by gloo or NCCL and stay: tests send them functions to call."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from fusedlayers.kernels.device import interpreted
from tests.support.seeds import move_seeds

COUNT = 2
# The longest that a test waits for both, and for the other one when one has failed.
SECONDS = 120
PARTNER_SECONDS = 10


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Processes:
    """``run(function, *arguments)`` calls the same function in both, under their process group.

    ``device`` is "cpu" (gloo) or "cuda" (NCCL, one GPU each). Functions live in importable modules. One that raises
    in either process raises here with its traceback; unless both raised the same, the next call starts new processes.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self.started = 0
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned in process 0 and in process 1."""
        if not self.workers:
            self._start()
        for _, connection in self.workers:
            connection.send((function, arguments))
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < COUNT:
            missing = {self.workers[rank][1]: rank for rank in range(COUNT) if rank not in replies}
            failed = any(not succeeded for succeeded, _ in replies.values())
            ready = wait(list(missing), timeout=PARTNER_SECONDS if failed else SECONDS)
            for connection in ready:
                try:
                    replies[missing[connection]] = connection.recv()
                except EOFError:
                    replies[missing[connection]] = (False, "the process is gone")
            if not ready:
                replies |= {rank: (False, f"no answer of process {rank}") for rank in missing.values()}
        reasons = [reply for succeeded, reply in replies.values() if not succeeded]
        if reasons:
            # Where both raised the same, none waits for the other, and they can go on.
            if len({reason.strip().rsplit("\n", 1)[-1] for reason in reasons}) > 1 or len(reasons) < COUNT:
                self.stop(kill=True)
            raise AssertionError(reasons[0])
        return [replies[rank][1] for rank in range(COUNT)]

    def stop(self, kill: bool = False) -> None:
        """Let both processes end."""
        for process, connection in self.workers:
            if kill:
                process.kill()
            else:
                connection.send(None)
        for process, connection in self.workers:
            process.join(SECONDS)
            connection.close()
        self.workers = []

    def _start(self) -> None:
        # On a CPU both are forks of one process that has imported what their functions need, and computed nothing. CUDA
        # would refuse a fork if an import had as much as asked for its devices.
        context = torch.multiprocessing.get_context("spawn" if self.device == "cuda" else "forkserver")
        context.set_forkserver_preload(["tests.support.training_runs"])
        self.started += 1
        store = self.folder / f"store{self.started}"
        port = free_port()
        for rank in range(COUNT):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.device, there, str(store), port), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))


def _serve(rank: int, device: str, connection: Connection, store: str, port: int) -> None:
    # What torchrun sets, so that code which asks whether it runs under it finds the same.
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"})
    torch.set_num_threads(1)
    move_seeds()
    if interpreted():
        # Not at the top: it imports Triton, which need not be there.
        from tests.support.quick_interpreter import speed_up
        from tests.support.rounding_by_position import round_by_position

        speed_up()
        round_by_position()
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    wait_at_most = timedelta(seconds=SECONDS)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=COUNT, timeout=wait_at_most, **options)
    while (task := connection.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        try:
            reply = (True, function(*arguments))
        except BaseException:  # whatever it is, the test has to show it
            reply = (False, traceback.format_exc())
        connection.send(reply)
    dist.destroy_process_group()
