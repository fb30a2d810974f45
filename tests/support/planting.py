"""Plants one fault in a copy of the package, and says whether the tests that should notice it do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of pytest's exit statuses those that say something of the package.
GREEN, RED = 0, 1


@dataclass(frozen=True)
class Fault:
    """``right``, found once in ``file``, becomes ``wrong``; ``tests`` are the words for pytest that should notice."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def fault(name: str, file: str, right: str, wrong: str, tests: str) -> Fault:
    """A fault whose tests are given as "test_file words": words for pytest's ``-k``."""
    module, _, chosen = tests.partition(" ")
    return Fault(name, file, right, wrong, (f"tests/{module}.py", *(("-k", chosen) if chosen else ())))


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the package as it is installed, with its tests."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("fusedlayers", "benchmarks", "tests", "train_examples", "configs"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        shutil.copytree(ROOT / "kernels", copy / "fusedlayers" / "kernels", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        yield copy


def place(copy: Path, file: str) -> Path:
    """Where a file of the repository lies in a copy of the package."""
    return copy / ("fusedlayers/" * file.startswith("kernels/") + file)


def planted(text: str, fault: Fault) -> str:
    """The source with the fault.

    Raises:
        ValueError: the source does not hold the right words exactly once.
    """
    if (count := text.count(fault.right)) != 1:
        raise ValueError(f"{fault.name}: expected {fault.right!r} once in {fault.file}, found it {count} times")
    return text.replace(fault.right, fault.wrong)


def status(copy: Path, tests: Sequence[str]) -> int:
    """Pytest's exit status of these tests on the package in ``copy``."""
    environment = os.environ | {"PYTHONPATH": str(copy), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode


def noticed(copy: Path, fault: Fault) -> str | None:
    """Why a fault planted in ``copy`` was not noticed as it should be, or None; the copy is left as it was."""
    if (found := status(copy, fault.tests)) != GREEN:
        return f"the tests are not green without it: exit status {found}"
    source = place(copy, fault.file)
    text = source.read_text()
    source.write_text(planted(text, fault))
    try:
        found = status(copy, fault.tests)
    finally:
        source.write_text(text)
    return None if found == RED else f"the tests do not fail: exit status {found}"
