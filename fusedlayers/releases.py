"""Decides if kernels are trusted under this release of Triton: a known one, or one that passed a self-test on this GPU.

An unknown release is tested once for each GPU and toolchain: one call of every kernel, in another process, before auto
mode runs the first kernel. The outcome is recorded in the user's cache folder. If the test fails, does not end, or
cannot be recorded, auto mode runs torch's operations, and one WARNING says so. If that folder cannot be written,
nothing is tested, because every process of every job would have to repeat the test.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from . import sources
from .folders import CacheFile, check_folder, locked
from .kernels.device import compiler, release_is_known, toolchain
from .planning import Device

logger = logging.getLogger("fusedlayers")

# Advice after a failed short test: the full self-test tests every configuration, and overrides the short one.
_HOW = "python -m fusedlayers.bench selftest tests every kernel, and those that pass run from then on"
# Timeout of the short test in seconds; it takes about 20.
LIMIT = 300.0

# Outcomes of tests that could not be recorded, by their key: (outcome, advice).
_unrecorded: dict[str, tuple[str, str]] = {}
_one_at_a_time = threading.Lock()


def standing(facts: Device) -> dict[str, Any]:
    """The facts of a GPU that an unknown release of Triton changes; none if auto mode would take no kernel anyway."""
    if release_is_known() or not facts.triton or facts.record is None:
        return {}
    place = _place(facts)
    found = (RECORD.read() or {}).get(place)
    if found == "":
        return {"release_note": f"{compiler()}, which passed the self-test on this machine"}
    known, how = ("which was not tested on this machine", _HOW) if found is None else (found, _HOW)
    known, how = _unrecorded.get(place, (known, how))
    note = f"{compiler()}, {known}"
    untested = found is None and place not in _unrecorded
    return {"release_note": note, "untested": untested, "left_to_torch": f"{note}; {how}"}


def test(facts: Device, device: torch.device) -> None:
    """Runs the short self-test on ``device``, unless it was run before; :func:`standing` has the outcome."""
    place = _place(facts)
    with _one_at_a_time:
        if place in _unrecorded:
            return
        try:
            check_folder(RECORD.path.parent)
        except ValueError as error:
            words = f"which was not tested on this machine, as no record of that can be kept ({error})"
            _unrecorded[place] = words, "set XDG_CACHE_HOME to another folder"
            return
        try:
            with locked(RECORD.path.with_suffix(".testing"), LIMIT) as free:
                # Another process of the same job may have run the test in the meantime.
                if place in (RECORD.read() or {}):
                    return
                if not free:
                    raise ValueError("another process has not finished testing it")
                record(facts, _outcome(facts, device))
        except (OSError, ValueError) as error:
            _unrecorded[place] = f"which was not tested on this machine: {error}", _HOW


def record(facts: Device, outcome: str = "") -> None:
    """Records the outcome of a test; it is empty for a pass, or if each failed configuration has its own record.

    Raises:
        OSError, ValueError: the file cannot be written.
    """
    place = _place(facts)
    RECORD.update(lambda found: {**(found or {}), place: outcome})


@cache
def warn_once(message: str) -> None:
    """Logs a WARNING once per process."""
    logger.warning(message)


def command(device: torch.device) -> Sequence[str]:
    """The command that runs the short self-test with the same interpreter and the same import path."""
    words = ["selftest", "--short", "--device", str(device)]
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from fusedlayers.bench.__main__ import main; sys.exit(main({words!r}))"
    )
    return [sys.executable, "-c", code]


def _outcome(facts: Device, device: torch.device) -> str:
    """Runs the short self-test; returns an empty string for a pass, or a clause that follows the release's name.

    Raises:
        OSError, ValueError: the test could not be run.
    """
    logger.warning(
        "%s is none of the releases that the kernels are known to compile with: they are tested on %s in another "
        "process, once, which takes about half a minute",
        compiler(), facts.name,
    )  # fmt: skip
    # A new session lets us kill the processes that the test starts together with it.
    process = subprocess.Popen(
        command(device), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"whose self-test on this machine did not end within {LIMIT:.0f} s"
    except BaseException:
        _end(process)
        raise
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    failed = next((number for number, line in enumerate(lines) if line.startswith("FAILED ")), None)
    # Too little memory, or a process that could not start, says nothing about the release.
    if failed is None or "out of memory" in output:
        raise ValueError(f"the self-test could not be run ({lines[-1] if lines else f'status {process.returncode}'})")
    first = " ".join(lines[failed : failed + 2]).removeprefix("FAILED ")
    return f"which failed the self-test on this machine ({first[:300]})"


def _end(process: subprocess.Popen[str]) -> None:
    """Kills the process, and all processes that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _place(facts: Device) -> str:
    return f"{facts.name}, {toolchain(facts.architecture)}, sources {_sources()}"


# The digest is part of the key, so that changed kernels are tested again.
_sources = cache(sources.of_kernels)


def _checked(found: Any) -> dict[str, str]:
    """The outcomes of tests, by their key.

    Raises:
        ValueError: ``found`` is no such record.
    """
    if type(found) is not dict or not all(type(outcome) is str for outcome in found.values()):
        raise ValueError("is no record of tested releases")
    return dict(found)


RECORD = CacheFile("releases.json", _checked)
