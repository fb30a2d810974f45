"""``make test-kernel`` finds tests for every kernel and every operation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.finding import NAMES, ROOT, files


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_kernel_and_every_operation_has_tests(name: str) -> None:
    assert files(name)
    assert files(name, gpu=True)


def test_files_are_found_by_their_names_and_imports() -> None:
    linear, split_k = files("linear"), files("split_k")
    assert "tests/functional/test_linear.py" in linear
    assert "tests/functional/test_linear_cross_entropy.py" not in linear, "that is an operation of its own"
    assert set(linear) < set(split_k), "the operation linear runs the kernel split_k"
    assert "tests/kernels/test_prepared_launches.py" in files("hopper"), "it imports the kernel"
    assert set(linear) < set(files("matmul")), "split_k is built on matmul"
    assert "tests/functional/test_linear_cross_entropy.py" in files("linear_log_probs"), "it mentions the operation"
    assert files("maxsim", gpu=True) == ["tests/gpu/test_maxsim_gpu.py"]


@pytest.mark.parametrize("name", ["gemm", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    command = [sys.executable, "-m", "tests.finding", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: NAME is '{name}'; expected one of {', '.join(sorted(NAMES))}\n"
