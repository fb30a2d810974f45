"""Every kernel compiles with the oldest and with the newest release of Triton that is claimed.

``make test-triton`` installs each release into a folder of its own, names the folders, and runs this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.test_code_generation import faults

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [Path(name) for name in os.environ.get("FUSEDLAYERS_TRITONS", "").split()]
# One with the warp-specialised kernels, and one with the generic ones, through another compiler.
TARGETS = ("sm_90", "gfx942")
# The mask by itself is drawn by torch where there is no GPU.
NOT_CALLED = {"keep"}
# The rows of some experts are no multiples of 16 bytes, and two registers are named in the lint of every configuration.
MAY_SPILL = {"hidden", "product", "hidden_gradient", "sm90_hidden_gradient"}
# Bytes at most, with a gate and sums: see the lint of its configurations.
MOST_SPILLED = {"sm90_epilogue_gradient": 24}
# A product in 32 bits that Triton 3.9 shows: the side of a quarter, 0 or 1, times its 64 columns.
BOUNDED = {"sm90_epilogue_gradient": "%side, %c64_i32"}


def kernels() -> set[str]:
    """The name of every kernel there is."""
    sources = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    return {name for source in sources for name in re.findall(r"^def _?(\w+)_kernel\(", source, re.MULTILINE)}


@pytest.mark.skipif(not FOLDERS, reason="make test-triton installs the releases of Triton")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_kernel_compiles(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder.absolute()), "TRITON_INTERPRET": "0"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(ROOT / "tests" / "every_kernel.py"), *TARGETS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["triton"] for report in reports} == {folder.name.removeprefix("triton-")}
    assert {report["kernel"].removesuffix("_kernel") for report in reports} == kernels() - NOT_CALLED
    red = []
    for report in reports:
        kernel = report["kernel"]
        may_spill = kernel in MAY_SPILL or report["spill_bytes"] <= MOST_SPILLED.get(kernel, 0)
        products = [each for each in report["int32_products"] if BOUNDED.get(kernel, "-") not in each]
        found = faults(report | {"int32_products": products})
        red += [f"{kernel}: {fault}" for fault in found if "registers spilled" not in fault or not may_spill]
    assert not red, "\n".join(red)
