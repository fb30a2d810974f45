"""What the end of a run says of tests that did not run: few lines, and right under several processes, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CONFTEST = """
from tests import selection

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

@pytest.mark.parametrize("number", range(2))
def test_that_skips_itself(number):
    if number:
        pytest.skip("odd")
    pytest.skip("even")
"""


@pytest.mark.parametrize(("processes", "full"), [(0, True), (1, False)])
def test_a_line_for_each_reason(processes: int, full: bool, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: exhaustive\n")
    ours = {"PYTHONPATH": str(ROOT), "FUSEDLAYERS_TEST_FULL": str(int(full)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-n", str(processes)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **ours}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("left out", "skipped", "SKIPPED"))] == [
        *([] if full else ["left out: 1 test (exhaustive, for make test-full)"]),
        "left out: 1,500 tests (no such device)",
        "skipped: 1 test (even)",
        "skipped: 1 test (odd)",
    ]
    assert f"{2 if full else 1} passed, 2 skipped" in lines[-1]
