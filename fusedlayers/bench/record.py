"""The JSON record of a benchmark run: all that a table or a plot shows, and nothing is shown from elsewhere.

Schema 1. Times are seconds, sizes bytes; what is unknown is null.

    schema            1
    arguments         the command line, as a list of words
    started, finished UTC, ISO 8601; finished is null while rows are still being added
    commit, dirty     of the clone the package lies in, or as given by --commit (dirty is null then); null without git
    source_sha256     of the package's Python files, so that a record can be matched with sources without git
    versions          fusedlayers, python, torch, cuda, triton, ptxas; of other libraries those that take part
    device            kind, name, architecture, driver, memory_bytes, l2_bytes, ceilings ([FLOP/s, bytes/s] or null)
    method            seconds_per_row, cold_cache_bytes, init, seed
    rows              one per shape and direction:
        case, grid, title, letters, shape, dtype, activation, gated, bias, recompute, dropout_p, op, dim (of a
                      reduction), skewed (records of earlier versions lack these four)
        direction     "forward" (no gradients wanted) or "forward_backward" (all gradients)
        commit        of the sources, where those of a later run that measured the row anew were others; else absent
        flops, bytes  of the operation: each product once, each input and output moved once
        floor_seconds max(flops / ceiling, bytes / ceiling), or null for an unknown device or float32
        verification  list of {contender, path, status, reason, findings: [{tensor, ok, message, max_error_ratio,
                      rms_ratio, worst_fraction}]}; status is "green", "red" or "not run"
        clocks        after the row: sm_mhz, memory_mhz, power_watts, temperature_celsius, or null
        contenders    by name ("torch eager", "torch.compile", "max-autotune", "checkpoint", "auto", "fused"):
            status    "timed", "not timed", or "same as auto" (auto mode chose the fused kernels)
            reason    why it was not timed, or why there is no replayed time; else ""
            path, replayed_path  of ours: "fused", "epilogue", "chunked", "sums", "algebraic", "reassociated" or
                      "torch", launched and inside a CUDA graph, where the planner may decide otherwise; null for torch
            launched  {median, first_quartile, third_quartile, minimum, repeats}
            replayed  the same inside a CUDA graph, or null
            host_seconds, host_bound   the host's time to launch; whether launched shows the host and not the device
            tflops, floor_share        from replayed if there is one, else launched; floor_share may be null
            saved_bytes, peak_bytes    kept for backward without parameters, null if unknown; most allocated beyond
                      the inputs
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__, planning, sources
from ..devices import describe
from ..folders import read_json, write_json
from ..kernels.device import HAS_TRITON, assembler
from .timing import Timing

SCHEMA = 1
_KEYS = ("started", "finished", "commit", "dirty", "versions", "device", "method", "rows")
Record = dict[str, Any]
# Our path when launched and when replayed.
Ways = tuple[str | None, str | None]
_PACKAGE = Path(__file__).resolve().parent.parent


def new_record(
    arguments: list[str], device: torch.device, method: dict[str, object], commit: str | None,
    libraries: Iterable[str] = (),
) -> Record:  # fmt: skip
    """A record with everything but its rows; ``libraries`` are other distributions that take part."""
    found_commit, dirty = git_state(_PACKAGE) if commit is None else (commit, None)
    return {
        "schema": SCHEMA,
        "arguments": arguments,
        "started": _now(),
        "finished": None,
        "commit": found_commit,
        "dirty": dirty,
        "source_sha256": sources.contents(),
        "versions": versions(device) | {name: _installed(name) for name in libraries},
        "device": device_facts(device),
        "method": method,
        "rows": [],
    }


def write(record: Record, path: Path) -> None:
    """The record as JSON; a reader never sees half of it."""
    write_json(record, path)


def finish(record: Record, path: Path) -> None:
    """Mark the record complete, and write it."""
    record["finished"] = _now()
    write(record, path)


def read(path: Path) -> Record:
    """A record from its file.

    Raises:
        ValueError: the file is missing, is no JSON, or has another schema; the message names the file.
    """
    record = read_json(path, "a JSON record of this benchmark")
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{path}: expected a record of schema {SCHEMA}, got {found!r}")
    if missing := [key for key in _KEYS if key not in record]:
        raise ValueError(f"{path}: expected a record with {', '.join(_KEYS)}, got one without {missing[0]}")
    return record


def contender_entry(
    timing: Timing, ways: Ways, flops: int, floor: float | None, saved: int | None, peak: int | None
) -> Record:
    """The entry of one timed contender."""
    return {
        "status": "timed",
        "reason": timing.replay_reason,
        "path": ways[0],
        "replayed_path": ways[1],
        "launched": asdict(timing.launched),
        "replayed": None if timing.replayed is None else asdict(timing.replayed),
        "host_seconds": timing.host_seconds,
        "host_bound": timing.host_bound,
        "tflops": flops / timing.device_seconds / 1e12,
        "floor_share": None if floor is None else floor / timing.device_seconds,
        "saved_bytes": saved,
        "peak_bytes": peak,
    }


def untimed_entry(reason: str, ways: Ways = (None, None), status: str = "not timed") -> Record:
    """The entry of a contender without times."""
    empty = ("launched", "replayed", "host_seconds", "host_bound", "tflops", "floor_share", "saved_bytes", "peak_bytes")
    return {"status": status, "reason": reason, "path": ways[0], "replayed_path": ways[1]} | dict.fromkeys(empty)


def floor_seconds(flops: int, moved_bytes: int, device: torch.device, dtype: torch.dtype) -> float | None:
    """That of planning, for torch's device and dtype."""
    return planning.floor_seconds(flops, moved_bytes, str(dtype).removeprefix("torch."), describe(device))


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it) of the clone that holds ``folder``; (None, None) without one."""
    # An installed copy may lie inside a clone of something else.
    if _output(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None, None
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return commit, None if commit is None or changes is None else bool(changes)


def versions(device: torch.device) -> dict[str, str | None]:
    """Of everything that decides what code runs on ``device``."""
    triton_version = ptxas = None
    if HAS_TRITON:
        import triton

        triton_version = triton.__version__
        architecture = describe(device).architecture
        ptxas = _ptxas_version(assembler(architecture).path) if architecture.startswith("sm_") else None
    return {
        "fusedlayers": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "ptxas": ptxas,
    }


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def device_facts(device: torch.device) -> Record:
    """What identifies the device, and its ceilings."""
    facts = describe(device)
    described: Record = {
        "kind": device.type,
        "name": facts.name if device.type == "cuda" else platform.machine(),
        "architecture": facts.architecture or None,
        "driver": None,
        "memory_bytes": None,
        "l2_bytes": None,
        "ceilings": None if facts.ceilings is None else list(facts.ceilings),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size}
        driver = _nvidia_smi(device, "driver_version")
        described["driver"] = driver[0] if driver else None
    return described


def clocks(device: torch.device) -> Record | None:
    """The clocks right now, as the driver reports them; None where nothing reports them."""
    values = _nvidia_smi(device, "clocks.sm,clocks.mem,power.draw,temperature.gpu")
    if values is None:
        return None
    names = ("sm_mhz", "memory_mhz", "power_watts", "temperature_celsius")
    return {name: _number(value) for name, value in zip(names, values, strict=True)}


def _nvidia_smi(device: torch.device, fields: str) -> list[str] | None:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    # By UUID, because CUDA_VISIBLE_DEVICES renumbers devices for CUDA alone.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    chosen = ["-i", f"GPU-{uuid}"] if uuid is not None else []
    answer = _output(["nvidia-smi", *chosen, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else None
    return values if values and len(values) == len(fields.split(",")) else None


def _ptxas_version(path: str) -> str | None:
    answer = _output([path, "--version"])
    words = answer.replace(",", " ").split() if answer else []
    return next((word[1:] for word in words if word.startswith("V") and word[1:2].isdigit()), None)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
