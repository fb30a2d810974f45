"""The table of ``make test-kernel``: every kernel and every operation has tests, and no test of theirs is forgotten."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedlayers.functional.operation import OPERATIONS
from tests.kernel_families import GPU_TESTS, TESTS, files

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {path.name for path in (ROOT / "kernels").iterdir() if (path / "__init__.py").exists()} - {"tuning"}
# What goes through all kernels alike, or takes one as an example.
OF_ALL = {
    "tests/test_adding_an_operation.py",
    "tests/verifying/test_verifying.py",
    "tests/verifying/test_verifying_dropout.py",
    "tests/bench/test_selftest.py",
    "tests/bench/test_calibrate.py",
    *(f"tests/gpu/test_{name}.py" for name in ("compiled_gpu", "large", "sanitizer", "selftest_gpu", "parallel_gpu")),
    *(f"tests/gpu/test_{name}_gpu.py" for name in ("calibrate", "language_model_parallel", "loss_heads", "norms")),
    "tests/gpu/test_package_classifier_gpu.py",
}


def names_in(path: Path) -> Iterator[str]:
    """The kernel families that a test imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fusedlayers.kernels"):
            inside = node.module.split(".")[2:]
            yield from inside[:1] or (alias.name for alias in node.names)


def test_every_kernel_and_every_operation_has_tests() -> None:
    kernels = {path.stem for path in (ROOT / "kernels").iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert set(TESTS) == set(GPU_TESTS) == kernels | set(OPERATIONS)
    for name in TESTS:
        for gpu in (False, True):
            found = files(name, gpu)
            assert found
            assert len(set(found)) == len(found), name
            assert [path for path in found if not (ROOT / path).is_file()] == []


def test_every_test_of_a_kernel_belongs_to_it() -> None:
    missing = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file in OF_ALL:
            continue
        words = path.stem.removeprefix("test_")
        wanted = FAMILIES & set(names_in(path))
        named = {name for name in TESTS if re.search(rf"(^|_){name}(_|$)", words)}
        # A name may be part of a longer one, which is meant then.
        wanted |= {name for name in named if not any(name in other for other in named - {name})}
        belongs = {name for name in TESTS if file in files(name, gpu="gpu" in path.parts)}
        missing += [f"{file} is not among the tests of {name}" for name in sorted(wanted - belongs)]
        if "gpu" in path.parts and not belongs:
            missing.append(f"{file} belongs to no kernel")
    assert not missing, "\n".join(missing)


def test_those_of_all_kernels_are_there() -> None:
    assert [file for file in OF_ALL if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("name", ["gemm", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    command = [sys.executable, "-m", "tests.kernel_families", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: NAME is '{name}'; expected one of {', '.join(sorted(TESTS))}\n"


def test_the_files_are_printed() -> None:
    command = [sys.executable, "-m", "tests.kernel_families", "maxsim", "--gpu"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "tests/gpu/test_maxsim_gpu.py\n"
