"""The facts about a torch device that planning works with, and the user's records of it; queried once per device."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import calibrations, releases
from .folders import CacheFile, check_folder, say_once
from .kernels import hopper
from .kernels.device import HAS_TRITON, RELEASE, compiled_folder, interpreted, toolchain
from .planning import Device

# Facts that replace the device's own in tests and in the self-test.
_assumed: dict[str, Any] = {}
# Whether the facts of a device include its calibration.
_calibrated = True


def describe(device: torch.device) -> Device:
    """The planning facts of ``device``; the interpreter counts as Triton on a CPU, for tests."""
    facts = _describe(device)
    return replace(facts, **_assumed) if _assumed else facts


@cache
def torch_has_grouped_products(device: torch.device) -> bool:
    """Whether torch has a grouped product of bfloat16 rows on ``device`` that does not synchronise."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def assumed(**facts: Any) -> Iterator[None]:
    """A context in which every device is described with these facts, for example with fewer SMs."""
    before = dict(_assumed)
    _assumed.update(facts)
    try:
        yield
    finally:
        _assumed.clear()
        _assumed.update(before)


@cache
def _describe(device: torch.device) -> Device:
    if device.type != "cuda":
        facts = Device(kind=device.type, name=device.type, triton=device.type == "cpu" and interpreted())
    else:
        found = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            architecture = found.gcnArchName.split(":")[0]
        else:
            architecture = f"sm_{found.major}{found.minor}"
        facts = Device(
            kind="cuda",
            name=found.name,
            architecture=architecture,
            sms=found.multi_processor_count,
            triton=HAS_TRITON,
            backend=hopper.backend_of(architecture),
            triton_release=RELEASE,
        )
    if not facts.triton:
        return facts
    if not interpreted() and (reason := why_nothing_compiles()):
        return replace(facts, why_no_kernels=reason)
    calibration = calibrations.on_record(facts) if _calibrated else None
    facts = replace(facts, avoided=failures_on_record(facts), calibration=calibration)
    return replace(facts, **releases.standing(facts))


def test_release(facts: Device, device: torch.device) -> None:
    """Tests an unknown release of Triton on ``device``, unless it was tested, and refreshes the device's facts."""
    releases.test(facts, device)
    _describe.cache_clear()


@cache
def why_nothing_compiles() -> str | None:
    """The reason if Triton has no folder for compiled kernels, or None.

    If Triton cannot write into its own folder, for example without a home folder, this process uses a temporary one.
    """
    folder = compiled_folder()
    try:
        # If the home folder is unknown, Triton does not expand "~", and would create it in the working folder.
        if not folder or folder.startswith("~"):
            raise ValueError(f"{folder!r}: no home folder is known")
        check_folder(Path(folder))
        return None
    except ValueError as error:
        reason = f"Triton cannot keep compiled kernels in {error}"
    try:
        temporary = tempfile.TemporaryDirectory(prefix="fusedlayers-")
    except OSError as error:
        return f"{reason}, nor in a temporary folder: {error.strerror}"
    atexit.register(temporary.cleanup)
    # Set the environment variable, because the compile workers of torch.compile read it, too.
    os.environ["TRITON_CACHE_DIR"] = temporary.name
    say_once(f"{reason}; this process keeps them in {temporary.name}")
    return None


@contextmanager
def uncalibrated() -> Iterator[None]:
    """A context in which devices have no calibrations; calibrations that are recorded inside count afterwards."""
    global _calibrated
    _calibrated = False
    _describe.cache_clear()
    try:
        yield
    finally:
        _calibrated = True
        _describe.cache_clear()


def records() -> str:
    """The state of the user's records, by their sizes and modification times; empty without any."""
    return "".join(f" {state}" for file in (FAILURES, calibrations.FILE, releases.RECORD) if (state := file.state))


def failures_on_record(facts: Device) -> frozenset[str]:
    """The configurations that failed the self-test on such a device, with this compiler and this assembler."""
    record = FAILURES.read()
    # Most machines have no record: skip building the key, which reads the assembler's version.
    return frozenset(record.get(_place(facts), ())) if record else frozenset()


def record_failures(facts: Device, names: Collection[str], tested: Collection[str] | None = None) -> Path | None:
    """Replaces the recorded failures of such a device, and returns the file; None if there are none before and after.

    ``tested``: the configurations of a partial test; the recorded failures of other configurations stay.

    Raises:
        OSError, ValueError: the file cannot be written.
    """
    place = _place(facts)

    def with_failures(found: dict[str, list[str]] | None) -> dict[str, list[str]]:
        record = dict(found or {})
        before = set(record.pop(place, ()))
        failed = set(names) | (set() if tested is None else before - set(tested))
        return record | {place: sorted(failed)} if failed else record

    if not names and place not in (FAILURES.read() or {}):
        return None
    path = FAILURES.update(with_failures)
    _describe.cache_clear()
    return path


def _place(facts: Device) -> str:
    return f"{facts.name}, {toolchain(facts.architecture)}"


def _checked(record: Any) -> dict[str, list[str]]:
    """The configurations that failed the self-test, by device and toolchain.

    Raises:
        ValueError: ``record`` is no such record.
    """
    lists = list(record.values()) if type(record) is dict else [None]
    if not all(type(names) is list and all(type(name) is str for name in names) for names in lists):
        raise ValueError("is no record of a self-test")
    return dict(record)


# The configurations that failed the self-test.
FAILURES = CacheFile("selftest.json", _checked)
