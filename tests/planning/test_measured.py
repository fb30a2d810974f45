"""The fitted numbers: each lies in data with its reason, and none in a Python file."""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fusedlayers.planning import measured
from tests.test_house import ROOT, python_files

DATA = json.loads(measured.PATH.read_text())
GROUPS = {
    **DATA["rules"],
    **{f"{name}, {part}": group for name, parts in DATA["architectures"].items() for part, group in parts.items()},
}


@pytest.mark.parametrize("group", GROUPS)
def test_numbers_have_reasons(group: str) -> None:
    names = [name for measurement in GROUPS[group] for name in measurement if name != "why"]
    assert len(names) == len({*names}) > 0
    for measurement in GROUPS[group]:
        assert len(measurement) > 1
        assert re.search(r"\d{4}-\d{2}-\d{2}", measurement["why"]), "when"
        assert re.search(r"\bH[12]00\b|no comparison is on record", measurement["why"]), "where, or that it is unknown"


@dataclass(frozen=True)
class Some:
    most_rows: int


@dataclass(frozen=True)
class More:
    most_rows: int
    least_rows: int


@dataclass(frozen=True)
class Others:
    pass


def test_numbers_are_read_by_their_names() -> None:
    assert measured.fitted("ffn", Some).most_rows == 16_384
    for wrong in (More, Others):
        with pytest.raises(TypeError, match="_rows"):
            measured.fitted("ffn", wrong)


def test_an_unknown_architecture_has_costs_and_no_preference() -> None:
    assert measured.preferences("sm_77") is None
    assert measured.tile_costs("sm_77") == measured.tile_costs("sm_90")
    known = measured.preferences("sm_90")
    assert known.uneven_from == {16: 600, 64: 1600}
    assert known.few_tiles == (0.4, 3)


def named_cards(source: str) -> Iterator[str]:
    """Comments and texts that name a card: where a number was measured stands in the data."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and re.search(r"\b[AHB]\d00\b", token.string):
            yield f"line {token.start[0]}: {token.string}"


def test_no_python_file_tells_what_was_measured() -> None:
    faults = [
        f"{path.name}, {fault}"
        for path in python_files(ROOT / "fusedlayers/planning")
        for fault in named_cards(path.read_text())
    ]
    assert not faults, "\n".join(faults)
    assert list(named_cards("LEAST = 1000  # on an H100 as fast as torch from here on"))
