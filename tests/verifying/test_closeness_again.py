"""Further draws, which tell a fault from chance: the rule of closeness where one tile of many is over its limit."""

from __future__ import annotations

import pytest
import torch

from fusedlayers.closeness import Evidence
from tests.support import seeds


def two_sets(*faults: dict[tuple[int, int], float]) -> list[Evidence]:
    """Two draws each of results with torch's own errors, those of some tiles of each set so many times as large."""
    generator = seeds.generator()
    found = []
    for fault in faults:
        evidence = Evidence()
        for _ in range(2):
            truth, mine, theirs = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(3))
            for (row, column), factor in fault.items():
                mine[64 * row : 64 * (row + 1), 64 * column : 64 * (column + 1)] *= factor
            evidence.add(*((truth + error / 100).float() for error in (mine, theirs)), truth)
        found.append(evidence)
    return found


@pytest.mark.parametrize(
    ("faults", "red"),
    [
        (({(1, 2): 1.8}, {(3, 0): 1.8}), False),  # chance: another tile each time
        (({(1, 2): 1.8}, {}), False),
        (({(1, 2): 1.8}, {(1, 2): 1.8}), True),
        (({(1, 2): 4.0}, {}), True),  # a fault that is not always there
        (({}, {(1, 2): 4.0}), True),
    ],
)
def test_further_draws_tell_a_fault_from_chance(faults: tuple[dict[tuple[int, int], float], ...], red: bool) -> None:
    first, again = two_sets(*faults)
    assert first.verdict().ok == (not faults[0])
    verdict = first.verdict(again=again)
    assert verdict.ok == (not red)
    if red:
        assert verdict.worst_tile == (1, 2)
        assert "in 2 draws, again in 2" in verdict.message


def test_a_fault_that_is_no_size_stays_one_in_further_draws() -> None:
    first, again = two_sets({(0, 0): 1.8}, {})
    numbers = torch.randn(256, 256)
    again.add(numbers.where(numbers < 2, torch.nan), numbers, numbers.double())
    assert "NaN/Inf pattern" in first.verdict(again=again).message
