"""A CUDA graph captured as people capture, in a fresh process and in auto mode, holds what the plan for graphs says."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusedlayers import planning
from fusedlayers.functional.switches import SWITCHES
from tests.gpu.captured_calls import CALLS, MODULES, PLAIN_CALLS

ROOT = Path(__file__).resolve().parents[2]
Outcomes = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """``outcomes(group)``: what a process of its own found, by name; it has compiled nothing before."""

    @functools.cache
    def run(group: str) -> dict[str, dict[str, Any]]:
        variables = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        variables["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
        command = [sys.executable, "-m", "tests.gpu.captured_calls", group]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
        return {line.pop("name"): line for line in lines}

    return run


def check(found: dict[str, Any], path: str = "torch") -> None:
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert "error" not in found, found["error"]
    launched, captured = found["planned"]
    assert launched == path
    assert captured in (*planning.KERNEL_PATHS, "chunked")
    operation = next(iter(found["launched"])).partition(" ")[0]
    assert found["launched"] == {f"{operation} {path}": PLAIN_CALLS}, "what a launched call takes"
    assert f"{operation} {captured}" in found["captured"], "what the plan for graphs says"
    assert not found["faults"]


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, calls in CALLS.items() for name in calls])
def test_a_capture_after_plain_calls_records_the_kernels(group: str, name: str, outcomes: Outcomes) -> None:
    found = outcomes(group)[name]
    check(found, CALLS[group][name].launched)
    assert not any(path.endswith(" torch") for path in found["captured"])


@pytest.mark.parametrize("name", MODULES)
def test_graphed_callables_hold_the_kernels(name: str, outcomes: Outcomes) -> None:
    """They warm up by themselves, too, with calls that take torch's path."""
    check(outcomes("modules")[name])
