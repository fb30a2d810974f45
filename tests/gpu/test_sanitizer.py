"""NVIDIA's compute-sanitizer watches the kernels: out of bounds, races in shared memory, reads of what nobody wrote."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
ROOT = Path(__file__).resolve().parents[2]
# Several operations have a file, and even a kernel, of the same name.
KERNEL_FILES = tuple((ROOT / "kernels").glob("*/sm90/*.py"))
SOURCES = [(path.name, path.read_text()) for path in KERNEL_FILES]
# Parts of the kernels' names (torch's own are not under test), and the groups of steps that launch them.
KERNELS = {
    "_forward_kernel": ("products",),
    "_hidden_kernel": ("products", "experts"),
    "_gradient_kernel": ("products", "reductions", "experts"),
    "_reduce_partials_kernel": ("products", "reductions", "splits"),
    "_product_kernel": ("splits", "experts"),
    "grouped_product_kernel": ("experts",),
    "_count_kernel": ("experts",),
    "_scan_kernel": ("experts",),
    "_place_kernel": ("experts",),
    "_spread_kernel": ("experts",),
    "_experts_sums_kernel": ("experts",),
    "_order_kernel": ("experts",),
    "row_product_kernel": ("splits",),
    "_losses_kernel": ("losses",),
    "_scaled_kernel": ("losses",),
    "_reduce_kernel": ("reductions",),
    "_combine_kernel": ("reductions", "experts"),
    "_routing_kernel": ("reductions",),
    "_weighted_kernel": ("reductions",),
    "_one_pass_kernel": ("reductions",),
    "_scores_kernel": ("reductions",),
    "_weights_kernel": ("reductions",),
}

# Where an sm90 kernel starts, and where it forks.
STARTS = r"^def (_?(?:sm90|stored)\w+_kernel)\("
FORKS = (
    r"^def warp_specialize\(|^ +(?:el)?if CONSUMERS == .*:$|^ +if db_ptr is None:$|^ +gl\.warp_specialize\(\[$"
    r"|^ +warp_specialize\([^#]*"
)
STARTED = {symbol for _, source in SOURCES for symbol in re.findall(STARTS, source, re.MULTILINE)}

pytestmark = pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")


def watched(tool: str, groups: tuple[str, ...], *options: str) -> str:
    """What the tool says of small training steps, which must run to their end."""
    script = [sys.executable, "-m", "tests.gpu.sanitized", *groups]
    command = [str(SANITIZER), "--tool", tool, "--print-limit", "0", *options, *script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert "ran to the end" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "SUMMARY" in done.stdout
    return done.stdout


@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_is_out_of_bounds(kernels: str) -> None:
    said = watched("memcheck", KERNELS[kernels], "--kernel-regex", f"kns={kernels}")
    assert "ERROR SUMMARY: 0 errors" in said, said[-3000:]


def of_the_compiler(kernel: str, file: str, line: int) -> bool:
    """Whether this line is where an sm90 kernel starts or forks: the compiler's own protocol between its warps.

    It meets at named barriers, which the tool does not follow.
    """
    for name, source in SOURCES:
        # What the kernels share is any kernel's.
        own = re.findall(STARTS, source, re.MULTILINE) or STARTED
        if name == file and any(symbol in kernel for symbol in own):
            for found in re.finditer(f"{STARTS}|{FORKS}", source, re.MULTILINE):
                first = source.count("\n", 0, found.start()) + 1
                if first <= line <= first + found[0].count("\n"):
                    return True
    return False


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_warp_races_another(kernels: str) -> None:
    said = watched("racecheck", KERNELS[kernels], "--kernel-regex", f"kns={kernels}")
    found = re.findall(r"access at (\S+) in (\S+\.py):(\d+)", said)
    accesses = [(kernel, file, int(line)) for kernel, file, line in found]
    assert accesses or "0 hazards" in said, said[-3000:]
    assert [access for access in accesses if not of_the_compiler(*access)] == []


def test_nothing_is_read_that_nobody_wrote() -> None:
    said = watched("initcheck", ())
    assert not re.findall(
        rf"Uninitialized __global__ memory read[^\n]*\n[^\n]*at \S*(?:{'|'.join(KERNELS)})[^\n]*", said
    )
