"""What a torch device can do, asked once per device: the facts that planning works with, and what is on record."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import calibrations
from .folders import cache_file, write_json
from .kernels import hopper
from .kernels.device import HAS_TRITON, RELEASE, interpreted, toolchain
from .planning import Device

# What tests and the self-test assume instead of what is asked.
_assumed: dict[str, Any] = {}
# Whether what was measured on a device is read with its facts.
_calibrated = True


def describe(device: torch.device) -> Device:
    """The planning facts of ``device``; the interpreter counts as Triton on a CPU, for tests."""
    facts = _describe(device)
    return replace(facts, **_assumed) if _assumed else facts


@cache
def torch_has_grouped_products(device: torch.device) -> bool:
    """Whether torch multiplies groups of bfloat16 rows on ``device`` in one product that waits for nothing."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def assumed(**facts: Any) -> Iterator[None]:
    """Every device is described with these facts for a while, as if it had fewer SMs for example."""
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
            pipelined=hopper.runs_on(architecture),
            triton_release=RELEASE,
        )
    if not facts.triton:
        return facts
    calibration = calibrations.on_record(facts) if _calibrated else None
    return replace(facts, avoided=failures_on_record(facts), calibration=calibration)


@contextmanager
def uncalibrated() -> Iterator[None]:
    """What was measured on devices is unknown for a while, as if nothing had been; what is recorded then is known."""
    global _calibrated
    _calibrated = False
    _describe.cache_clear()
    try:
        yield
    finally:
        _calibrated = True
        _describe.cache_clear()


def records() -> str:
    """Which state of the user's records there is, by their sizes and times of change; empty without any."""
    paths = (failures_file(), calibrations.calibration_file())
    found = [path.stat() for path in paths if path.exists()]
    return "".join(f" {each.st_size}-{each.st_mtime_ns}" for each in found)


def failures_file() -> Path:
    """Where the self-test records what failed."""
    return cache_file("selftest.json")


def failures_on_record(facts: Device) -> frozenset[str]:
    """The configurations that failed the self-test on such a device, with this compiler and this assembler."""
    path = failures_file()
    # Most machines have no such file, and pay nothing for it.
    return frozenset(_read(path).get(_place(facts), ())) if path.exists() else frozenset()


def record_failures(facts: Device, names: Collection[str], tested: Collection[str] | None = None) -> Path | None:
    """Replaces what is on record for such a device, and returns the file; None where there was and is nothing.

    ``tested`` are the configurations of a test of some; what is on record of others stays.
    """
    path = failures_file()
    record = _read(path) if path.exists() else {}
    before = record.pop(_place(facts), None)
    kept = set() if tested is None or before is None else set(before) - set(tested)
    if failed := kept.union(names):
        record[_place(facts)] = sorted(failed)
    elif before is None:
        return None
    write_json(record, path)
    _describe.cache_clear()
    return path


def _place(facts: Device) -> str:
    return f"{facts.name}, {toolchain(facts.architecture)}"


def _read(path: Path) -> dict[str, list[str]]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: it cannot be read ({error}); run the self-test again", stacklevel=2)
        return {}
    right = isinstance(record, dict) and all(isinstance(names, list) for names in record.values())
    if not right:
        warnings.warn(f"{path} is ignored: it is no record of a self-test; run that again", stacklevel=2)
    return record if right else {}
