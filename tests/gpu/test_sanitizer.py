"""NVIDIA's compute-sanitizer watches the kernels: out of bounds, races in shared memory, reads of what nobody wrote."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
# The kernels by parts of their names: torch's own are not under test.
@pytest.mark.parametrize("kernels", ["_forward_kernel", "_gradient_kernel", "_reduce_partials_kernel"])
def test_the_sanitizer_has_nothing_to_say(tool: str, kernels: str) -> None:
    command = [str(SANITIZER), "--tool", tool, "--kernel-regex", f"kns={kernels}", "--error-exitcode", "9"]
    script = [sys.executable, "-m", "tests.gpu.sanitized"]
    done = subprocess.run([*command, *script], cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "ran to the end" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout, done.stdout[-500:]
