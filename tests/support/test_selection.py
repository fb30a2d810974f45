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


def run(folder: Path, *options: str, full: bool = False) -> tuple[list[str], list[str]]:
    """The names of the tests that pass, and the lines at the end, with none of the plugins that load themselves."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = full: exhaustive\n    gpu: on a GPU\n    sampled: of many\n"
    )
    ours = {"PYTHONPATH": str(ROOT), "FUSEDLAYERS_TEST_FULL": str(int(full)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "xdist", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **ours}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    passed = [line.partition("::")[2] for line in lines if line.startswith("PASSED")]
    return passed, [line for line in lines if line.startswith(("left out", "skipped"))]


@pytest.mark.parametrize("full", [False, True])
def test_samples_and_a_line_for_each_reason(full: bool, tmp_path: Path) -> None:
    """Of twelve cases four, which have every value; of 48 sixteen, which have every pair; or all of them."""
    passed, lines = run(tmp_path, "-n", "0" if full else "1", full=full)
    assert lines == [
        *([] if full else [f"left out: {1 + 8 + 32} tests (exhaustive, for make test-full)"]),
        "left out: 1,500 tests (no such device)",
        "skipped: 1 test (even)",
        "skipped: 1 test (odd)",
    ]
    cases = {
        name: [each.partition("[")[2] for each in passed if name in each] for name in ("test_values", "test_pairs")
    }
    assert len(passed) == (1 + 2 + 12 + 48 if full else 1 + 1 + 4 + 16)
    values = {word for case in cases["test_values"] for word in re.findall(r"\w+", case)}
    assert values == {"a", "b", "c", "three0", "three1", "three2", "three3", "0", "1", "2"}
    pairs = [tuple(map(int, re.findall(r"\d", case))) for case in cases["test_pairs"]]
    for first, second in itertools.combinations(range(3), 2):
        # The values of the parameter with three are the first in a name.
        assert len({(case[first], case[second]) for case in pairs}) == (12 if first == 0 else 16)


def test_a_case_that_is_named_runs(tmp_path: Path) -> None:
    named = {"test_pairs[2-3-3]", "test_values[a-three0-2]"}
    assert named.isdisjoint(run(tmp_path)[0])
    assert set(run(tmp_path, *(f"test_some.py::{case}" for case in named))[0]) == named
