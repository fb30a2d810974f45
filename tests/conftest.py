"""What every test starts from: the interpreter switched on in time, fixed seeds, none of the user's switches."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()

# Triton reads its switch when a kernel is defined, so it is set here, before any test imports fusedlayers.
if HAS_TRITON and not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETING = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
if INTERPRETING:
    from tests.support.quick_interpreter import speed_up
    from tests.support.rounding_by_position import round_by_position

    speed_up()
    round_by_position()

# The tests say themselves which backend they mean.
from fusedlayers.functional.switches import SWITCHES  # noqa: E402  not before the interpreter is on
from tests.support import seeds, selection  # noqa: E402

for _switch in SWITCHES:
    os.environ.pop(_switch, None)

# What test files draw when they are imported is the same in every run of the same files.
seeds.move_seeds()
seeds.start_over()

# The interpreter is slow and the first compilation slower: a deadline would measure the machine.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Say at the end how many tests were left out."""
    config.pluginmanager.register(selection)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, with the reason, what needs a device, the interpreter or time that is not there."""
    if not HAS_CUDA:
        no_gpu = "no CUDA device"
    elif INTERPRETING:
        no_gpu = "TRITON_INTERPRET is on, so no kernel would reach the GPU"
    else:
        no_gpu = ""
    no_interpreter = "Triton is not installed" if not HAS_TRITON else "TRITON_INTERPRET is off"

    def why(item: pytest.Item) -> str:
        if no_gpu and item.get_closest_marker("gpu"):
            return no_gpu
        if not INTERPRETING and item.get_closest_marker("interpreter"):
            return no_interpreter
        return selection.unmet(item)

    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    selection.leave_out(config, items, why)
    # Side by side, so that one worker has all that need two more processes, and starts them once.
    items.sort(key=lambda item: "processes" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was imported and collected: it would look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers for a test, alone or in any order, and global settings as they were before it."""
    seeds.start_over()
    if HAS_CUDA:
        seeds.start_over_on_gpus()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    log = logging.getLogger("fusedlayers")
    level = log.level
    yield
    # An example that runs inside a test raises the level, and a later test would count what is logged.
    log.setLevel(level)
    torch.set_default_dtype(dtype)
    # The call imports the compiler, which takes seconds.
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no computation survives unseen: NaN, or the largest integer."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that Python code leaves uninitialised is full of NaN, so that a store which is missing shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return _poison(allocate(*args, **kwargs))

        return allocate_poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """A fresh Python process, outside the clone, with warnings as errors: ``run_python(code, TRITON_INTERPRET="0")``.

    Keywords are environment variables; None removes one. The process must succeed, or the test fails with its output.
    """

    def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One pair of processes for all tests, joined by NCCL on two GPUs where tests run on a GPU, else by gloo."""
    # Imported here, because the interpreter has to be switched on first.
    from tests.support.processes import Processes

    device = "cuda" if HAS_CUDA and not INTERPRETING else "cpu"
    pair = Processes(device, tmp_path_factory.mktemp("processes"))
    yield pair
    pair.stop()
