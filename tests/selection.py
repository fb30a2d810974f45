"""Which tests run here, said in a few lines: what needs something that is missing is left out, and counted by reason.

Tests marked ``full`` are exhaustive: every width, every draw, every model. ``make test`` runs a sample of what they
prove, and ``FUSEDLAYERS_TEST_FULL=1``, which ``make test-full`` sets, runs them all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

FULL = os.environ.get("FUSEDLAYERS_TEST_FULL", "0") == "1"
NOT_FULL = "exhaustive, for make test-full"
# By reason: how many tests this process left out, or, under xdist, a worker, of which all leave out the same.
_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def draws(usual: int, full: int) -> int:
    """How many random examples a test draws: few in `make test`, all in `make test-full`."""
    return full if FULL else usual


def unmet(item: pytest.Item) -> str:
    """The reason of the first mark that skips this test; empty where none does. Conditions are plain values here."""
    if not FULL and item.get_closest_marker("full"):
        return NOT_FULL
    for mark in item.iter_markers("skipif"):
        if any(mark.args):
            return str(mark.kwargs["reason"])
    return ""


def leave_out(config: pytest.Config, items: list[pytest.Item], why: Callable[[pytest.Item], str]) -> None:
    """Deselect the items for which ``why`` has a reason."""
    reasons = {item: why(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
    config.stash[_LEFT_OUT] = dict(Counter(filter(None, reasons.values())))
    items[:] = [item for item in items if not reasons[item]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A worker of xdist ended, or crashed and told nothing."""
    told = getattr(node, "workeroutput", {}).get("left_out")
    if told:
        node.config.stash[_LEFT_OUT] = told  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each reason, of tests that were left out or skipped, instead of one for each place."""
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for word, reasons in (("left out", config.stash.get(_LEFT_OUT, {})), ("skipped", skipped)):
        for reason, count in sorted(reasons.items()):
            tests = "1 test" if count == 1 else f"{count:,} tests"
            terminalreporter.write_line(f"{word}: {tests} ({reason.removeprefix('Skipped: ')})")
