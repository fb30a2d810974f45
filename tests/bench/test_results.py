"""What the benchmark shows on the screen follows the record."""

from __future__ import annotations

import sys

import pytest

from fusedlayers.bench import tables
from fusedlayers.bench.record import Record
from tests.support import gpu_records


@pytest.fixture
def gpu_record() -> Record:
    return gpu_records.gpu_record()


def test_rows_slower_than_torch_are_named(gpu_record: Record) -> None:
    assert tables.slower_than_torch(gpu_record) == [
        "ffn 8192×2048×8192 forward + backward, launched: 0.90 of torch's speed (torch path)",
        "ffn 8192×2048×8192 forward + backward, replayed: 0.50 of torch's speed (fused path)",
    ]


def test_a_difference_within_the_spread_is_no_slowness(gpu_record: Record) -> None:
    """0.90 of torch's speed, launched, where the middle halves of the times overlap; replayed they do not."""
    contenders = gpu_record["rows"][1]["contenders"]
    contenders["auto"]["launched"]["first_quartile"] = 905e-6
    contenders["torch.compile"]["launched"]["third_quartile"] = 910e-6
    assert [line.split(": ")[0] for line in tables.slower_than_torch(gpu_record)] == [
        "ffn 8192×2048×8192 forward + backward, replayed"
    ]


def test_the_table_on_the_screen_is_narrow(gpu_record: Record) -> None:
    lines = tables.screen(gpu_record).plain().splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 120


def test_without_rich_the_table_is_plain(
    gpu_record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    tables.screen(gpu_record).show()
    assert capsys.readouterr().out == tables.screen(gpu_record).plain() + "\n"
