"""The calls of the tests of captures: of each a recorded call alone takes the kernels."""

from __future__ import annotations

import pytest

from fusedlayers.planning import CARDS, Device
from tests.gpu.captured_calls import CALLS, CapturedCall

FLAT = {f"{group}, {name}": call for group, calls in CALLS.items() for name, call in calls.items()}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("call", FLAT.values(), ids=FLAT)
def test_a_recorded_call_alone_takes_the_kernels(call: CapturedCall, card: str) -> None:
    assert call.paths(call.on(CARDS[card])) == (call.launched, call.kernels)


def test_where_no_kernels_run_there_is_nothing_to_record() -> None:
    for call in FLAT.values():
        assert call.paths(call.on(Device("cpu", "cpu"))) == ("torch", "torch")
