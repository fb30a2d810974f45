"""What auto mode takes now, replayed on the times that are committed: changed thresholds show here without a GPU."""

from __future__ import annotations

import pytest

from benchmarks import replay
from benchmarks.replay import WRONG, Decision


@pytest.fixture(scope="module")
def found() -> list[Decision]:
    return replay.committed()


def test_decisions_cost_little(found: list[Decision]) -> None:
    assert len(found) > 900
    assert {each.card for each in found} == {"H100", "H200"}
    assert replay.mean_regret(found) <= 1.0105
    worse = [each.line() for each in found if each.regret > WRONG]
    assert len(worse) <= 0.08 * len(found), "\n".join(worse)


def test_replayed_decisions_cost_less(found: list[Decision]) -> None:
    """In a graph the device alone decides; launched one by one, a slow host does, which was another in each record."""
    replayed = [each for each in found if each.kind == "replayed"]
    assert replay.mean_regret(replayed) <= 1.003
    assert sum(each.regret > WRONG for each in replayed) <= 0.03 * len(replayed)


def test_a_wrong_decision_is_found(found: list[Decision]) -> None:
    each = next(each for each in found if len(each.seconds) > 1 and each.regret == 1)
    [other] = [path for path in each.seconds if path != each.path][:1]
    wrong = each._replace(path=other)
    assert wrong.regret == each.seconds[other] / each.seconds[each.path] > 1
    assert f": {other} (" in wrong.line()


def test_the_command_prints_a_line_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["--worst", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Auto mode's time over that of the fastest path"
    everything = next(place for place, line in enumerate(printed) if line.startswith("all "))
    assert len(printed) == everything + 3
