"""The script that plants faults: each of them fits the sources, and what it says of a fault is so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import planting
from tests.support.operands import needs_kernels
from tests.support.planted_faults import FAULTS
from tests.support.planting import ROOT, Fault, copied, noticed, place, planted

BAND = next(fault for fault in FAULTS if fault.file == "kernels/column_sums.py")


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_fits_the_sources(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert planted(source, fault) != source
    file, *words = fault.tests
    assert re.search(rf"def test_\w*{words[-1] if words else ''}", (ROOT / file).read_text())


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


def test_a_fault_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape(f"{BAND.name}: expected 'nowhere' once in {BAND.file}, found it 0")):
        planted("sums", replace(BAND, right="nowhere"))


@pytest.mark.full
@needs_kernels
def test_a_fault_is_noticed_and_taken_back() -> None:
    with copied() as copy:
        source = place(copy, BAND.file)
        before = source.read_bytes()
        assert noticed(copy, BAND) is None
        assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("found", "why_not"),
    [
        ([0, 1], None),
        ([0, 0], "the tests do not fail: exit status 0"),
        ([0, 2], "the tests do not fail: exit status 2"),
        ([5], "the tests are not green without it: exit status 5"),
    ],
)
def test_only_tests_that_fail_notice_a_fault(
    found: list[int], why_not: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place(tmp_path, BAND.file)
    source.parent.mkdir(parents=True)
    source.write_text(BAND.right)
    contents = []

    def status(copy: Path, tests: tuple[str, ...]) -> int:
        contents.append(source.read_text())
        return found[len(contents) - 1]

    monkeypatch.setattr(planting, "status", status)
    assert noticed(tmp_path, BAND) == why_not
    assert contents == [BAND.right, BAND.wrong][: len(found)]
    assert source.read_text() == BAND.right
