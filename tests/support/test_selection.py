"""What the end of a run says of tests that did not run: few lines, and right under several processes, too."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
from tests.support import selection

def pytest_configure(config):
    config.pluginmanager.register(selection)

def pytest_collection_modifyitems(config, items):
    selection.leave_out(config, items, selection.unmet)
"""
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no such device")
@pytest.mark.parametrize("number", range(1500))
def test_of_a_device(number):
    raise AssertionError

@pytest.mark.skipif(False, reason="never")
def test_that_runs():
    pass

@pytest.mark.full
def test_that_is_exhaustive():
    pass

@pytest.mark.gpu
@pytest.mark.full
def test_that_is_exhaustive_on_a_gpu():
    pass

@pytest.mark.sampled
@pytest.mark.parametrize("one", [0, 1, 2])
@pytest.mark.parametrize(("two", "three"), [("a", {}), ("a", []), ("b", {}), ("c", {})])
def test_values(one, two, three):
    pass

@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("two", range(4))
@pytest.mark.parametrize("three", range(3))
def test_pairs(one, two, three):
    pass

@pytest.mark.parametrize("number", range(2))
def test_that_skips_itself(number):
    if number:
        pytest.skip("odd")
    pytest.skip("even")
"""


def run(folder: Path, *options: str, full: bool = False) -> list[str]:
    """The lines that pytest prints, with none of the plugins that load themselves."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = full: exhaustive\n    gpu: on a GPU\n    sampled: of many\n"
    )
    ours = {"PYTHONPATH": str(ROOT), "FUSEDLAYERS_TEST_FULL": str(int(full)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **ours}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# Of twelve cases four, which have every value; of 48 sixteen, which have every pair.
@pytest.mark.parametrize(
    ("processes", "full", "passed", "exhaustive"),
    [("0", True, 1 + 2 + 12 + 48, 0), ("1", False, 1 + 1 + 4 + 16, 1 + 8 + 32)],
)
def test_a_line_for_each_reason(processes: str, full: bool, passed: int, exhaustive: int, tmp_path: Path) -> None:
    lines = run(tmp_path, "-n", processes, full=full)
    assert [line for line in lines if line.startswith(("left out", "skipped", "SKIPPED"))] == [
        *([f"left out: {exhaustive} tests (exhaustive, for make test-full)"] if exhaustive else []),
        "left out: 1,500 tests (no such device)",
        "skipped: 1 test (even)",
        "skipped: 1 test (odd)",
    ]
    assert f"{passed} passed, 2 skipped" in lines[-1]


def test_a_sample_has_every_value_and_every_pair(tmp_path: Path) -> None:
    lines = run(tmp_path, "--collect-only", "-q")
    values = [re.findall(r"\w+", line.partition("[")[2]) for line in lines if "test_values" in line]
    pairs = [tuple(map(int, re.findall(r"\d", line.partition("[")[2]))) for line in lines if "test_pairs" in line]
    assert {value for case in values for value in case} == {
        "a",
        "b",
        "c",
        "three0",
        "three1",
        "three2",
        "three3",
        "0",
        "1",
        "2",
    }
    for first, second in itertools.combinations(range(3), 2):
        found = {(case[first], case[second]) for case in pairs}
        assert len(found) == len({one for one, _ in found}) * len({two for _, two in found}) >= 12


def test_a_case_that_is_named_runs(tmp_path: Path) -> None:
    run(tmp_path)
    lines = run(tmp_path, "test_some.py::test_pairs[2-3-3]", "test_some.py::test_values[a-three0-2]")
    assert "2 passed" in lines[-1]
