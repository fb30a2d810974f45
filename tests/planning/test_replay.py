"""What auto mode takes, replayed on the times that are committed: what changes a decision shows here without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import record, replay
from benchmarks.measured import sources
from benchmarks.replay import WRONG, Decision
from fusedlayers.planning import CARDS
from fusedlayers.planning.record import LAUNCHED, REPLAYED


@pytest.fixture(scope="module")
def found() -> list[Decision]:
    """Every decision as shipped, and an eighth of them left out, as a record is made anew for each."""
    return replay.committed(left_out=8)


@pytest.mark.parametrize("how", [LAUNCHED, REPLAYED])
def test_decisions_cost_little(found: list[Decision], how: str) -> None:
    rows = [each for each in found if each.how == how]
    assert len(rows) > 1000
    assert {each.card for each in rows} == {"H100", "H200"}
    assert replay.mean_regret(each.regret(each.shipped) for each in rows) <= 1.005
    worse = [each.line() for each in rows if each.regret(each.shipped) > WRONG]
    assert len(worse) <= 0.05 * len(rows), "\n".join(worse)


@pytest.mark.parametrize("how", [LAUNCHED, REPLAYED])
def test_sizes_that_were_not_measured_cost_little(found: list[Decision], how: str) -> None:
    regrets = [each.regret(each.left_out) for each in found if each.how == how and each.left_out is not None]
    assert len(regrets) > 100
    assert replay.mean_regret(regrets) <= (1.04 if how == LAUNCHED else 1.025)
    assert replay.wrong(regrets) <= (0.18 if how == LAUNCHED else 0.11)


def test_a_wrong_decision_is_found(found: list[Decision]) -> None:
    each = next(each for each in found if each.left_out is not None and each.regret(each.shipped) == 1)
    [other, *_] = [path for path in each.seconds if path != each.shipped]
    assert each.regret(other) == each.seconds[other] / each.seconds[each.shipped] > 1
    assert f", as shipped {other} (" in each._replace(shipped=other).line()


def test_the_record_is_that_of_the_results() -> None:
    assert record.main(["--check"]) == 0


def test_every_row_of_the_results_is_on_record() -> None:
    for card, device in CARDS.items():
        known = {(row.kin, row.variant, row.sizes) for row in device.record.rows()}
        for source in sources(card):
            problem = replace(source.problem, captured=False)
            if problem == problem.decisive and len(source.replayed) > 1:
                assert (problem.recorded_kin, problem.variant, problem.sizes) in known


def test_the_table_has_a_line_for_each_group(found: list[Decision]) -> None:
    table = replay.table(found)
    assert [row[:3] for row in table.rows[-3:]] == [("all", "", "launched"), ("all", "", "replayed"), ("all", "", "")]
