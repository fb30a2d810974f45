"""Selects the tests that run here, and counts those that are left out by reason.

``make test`` samples two kinds of tests; ``FUSEDLAYERS_TEST_FULL=1``, which ``make test-full`` sets, runs all of both:

- ``pytest.mark.sampled`` on a test of many parameters: a sample in which every value of every parameter occurs, or,
  with ``sampled(together=2)``, every pair of values of two parameters.
- ``pytest.mark.full``: long tests that prove at more sizes, or on more models, what other tests prove.

Tests that need a GPU are never sampled: a GPU is quick enough for all of them.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

FULL = os.environ.get("FUSEDLAYERS_TEST_FULL", "0") == "1"
NOT_FULL = "exhaustive, for make test-full"
# The number of tests left out, by reason. Under xdist it is a worker's: all workers leave out the same tests.
_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def draws(usual: int, full: int) -> int:
    """How many random examples a test draws: few in `make test`, all in `make test-full`."""
    return full if FULL else usual


def unmet(item: pytest.Item) -> str:
    """The reason of the first mark that skips this test; empty where none does. Conditions are plain values here."""
    if _in_samples(item) and item.get_closest_marker("full"):
        return NOT_FULL
    for mark in item.iter_markers("skipif"):
        if any(mark.args):
            return str(mark.kwargs["reason"])
    return ""


def _in_samples(item: pytest.Item) -> bool:
    return not (FULL or item.get_closest_marker("gpu"))


def leave_out(config: pytest.Config, items: list[pytest.Item], why: Callable[[pytest.Item], str]) -> None:
    """Deselect the items for which ``why`` has a reason, and those beyond the samples."""
    reasons = {item: why(item) for item in items}
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        sampled = _in_samples(item) and item.get_closest_marker("sampled")
        if sampled and not reasons[item] and isinstance(item, pytest.Function):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        reasons |= dict.fromkeys(set(cases) - set(_sample(cases)), NOT_FULL)
    config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
    config.stash[_LEFT_OUT] = dict(Counter(filter(None, reasons.values())))
    items[:] = [item for item in items if not reasons[item]]


def _sample(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Few cases of one test that together have what all have: every value, or every combination of some values."""
    mark = cases[0].get_closest_marker("sampled")
    together = min(mark.kwargs.get("together", 1), len(cases[0].callspec.params))
    has = {case: set(itertools.combinations(_values(case), together)) for case in cases}
    missing = set().union(*has.values())
    chosen = []
    while missing:
        # The first of those that add the most.
        best = max(cases, key=lambda case: len(has[case] & missing))
        chosen.append(best)
        missing -= has[best]
    return chosen


def _values(case: pytest.Function) -> list[tuple[str, object]]:
    """(name, value) of each parameter; what cannot be hashed is known by how it is written."""
    values = []
    for name, value in sorted(case.callspec.params.items()):
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        values.append((name, (type(value), value)))
    return values


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
