"""Records as tables and pictures, and one record out of several."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layer_tables, layers, plots, records
from fusedlayers.bench import __main__ as bench
from fusedlayers.bench import record
from fusedlayers.bench.record import Record
from tests.support import gpu_records
from tests.support.gpu_records import entry


def command(*words: object) -> int:
    return records.main([str(word) for word in words])


@pytest.fixture
def gpu_record() -> Record:
    return gpu_records.gpu_record()


def test_the_markdown_table_shows_wins_and_losses(gpu_record: Record) -> None:
    text = layer_tables.markdown(gpu_record)
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0, bf16, 2026-11-20, commit cccccccccc with local changes" in text
    assert "**FFN, gelu_tanh, bias: forward + backward, bf16**" in text
    assert (
        "| 131072×64×256 | 416* / 400 | 917 / – | 208 / 160 | fused | same | 2.00 / 2.50 | 50% | 3.0 / 3.0 / 3.0 "
        "| 200 / 200 / 200 |" in text
    )
    assert (
        "| 8192×2048×8192 | 1000 / 990 | 900 / 800 | 1000 / 1600 | torch / fused | 2000 / 1900 | 0.90 / 0.50 |" in text
    )


def test_a_run_leaves_a_record_with_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ("ffn", "--device", "cpu", "--shape", "70x24x40", "--time", "--seconds", "0.01")
    assert bench.main([*words, "--output", str(tmp_path)]) == 0
    path = tmp_path / "ffn-fp32-cpu.json"
    capsys.readouterr()
    assert command("table", path) == 0
    assert capsys.readouterr().out == layer_tables.markdown(record.read(path))
    assert command("plot", path) == 0
    assert (tmp_path / "ffn-fp32-cpu-ffn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["table", "plot"])
def test_a_record_without_times_is_refused(
    name: str, gpu_record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(gpu_record | {"rows": []}, tmp_path / "all.json")
    assert command(name, tmp_path / "all.json") == 1
    assert "the record holds no times" in capsys.readouterr().err


def test_plots_are_made_from_the_file(gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.json"
    record.write(gpu_record, path)
    drawn: dict[str, Sequence[Mapping[str, float]]] = {}
    draw = plots.bar_picture

    def note(
        groups: Sequence[str], panels: Mapping[str, Sequence[Mapping[str, float]]], colours: Mapping[str, str]
    ) -> Any:
        assert list(groups) == ["131072×64×256", "8192×2048×8192"]
        drawn.update(panels)
        return draw(groups, panels, colours)

    monkeypatch.setattr(plots, "bar_picture", note)
    assert command("plot", path) == 0
    assert (tmp_path / "all-ffn.png").stat().st_size > 10_000
    times, memory = drawn["time\nforward + backward"], drawn["peak memory\nforward + backward"]
    # The kernels' own bar is left out where auto mode takes them, and compiled torch was not captured there.
    assert times[0] == pytest.approx({"torch eager": 1, "torch.compile": 917 / 400, "fusedlayers": 160 / 400})
    assert times[1]["forced kernels"] == pytest.approx(1900 / 990)
    assert memory[0]["fusedlayers"] == 1


def test_sizes_that_differ_in_tokens_are_points_of_lines(gpu_record: Record, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = gpu_record["rows"][0]
    rows = [first | {"shape": [tokens, *first["shape"][1:]]} for tokens in (4096, 1024, 2048)]
    figure, title = plots._lines(rows)
    assert title == "FFN, gelu_tanh, bias, d_model × d_ff = 64×256: less is better"
    assert [axes.get_title() for axes in figure.axes] == [
        "time, forward + backward", "peak memory, forward + backward"
    ]  # fmt: skip
    torch_times = figure.axes[0].lines[0]
    assert list(torch_times.get_xdata()) == [1024, 2048, 4096]
    assert list(torch_times.get_ydata()) == pytest.approx([0.4] * 3)
    record.write(gpu_record | {"rows": rows}, tmp_path / "all.json")
    assert command("plot", tmp_path / "all.json") == 0
    assert (tmp_path / "all-ffn.png").stat().st_size > 10_000


def test_a_picture_has_no_empty_places_and_no_endless_bars() -> None:
    pytest.importorskip("matplotlib")
    panels = {"time": [{"torch": 1.0, "ours": 0.5}, {"ours": 40.0}], "memory": [{"torch": 1.0}, {}]}
    times, memory = plots.bar_picture(["wide", "narrow"], panels, {"torch": "#111111", "ours": "#222222"}).axes
    lengths = {round(bar.get_y() + bar.get_height() / 2, 1): bar.get_width() for bar in times.patches}
    assert lengths == {0.0: 1.0, 1.0: 0.5, 2.8: plots.LONGEST_BAR}
    assert [text.get_text() for text in times.texts] == ["1.00", "0.50", "40.00 (cut off)"]
    assert [bar.get_width() for bar in memory.patches] == [1.0]


def test_every_contender_has_a_colour() -> None:
    assert set(plots.COLOURS) == set(layers._WORDS.values())


def test_plots_without_matplotlib_say_what_to_install(
    gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record.write(gpu_record, tmp_path / "all.json")
    assert command("plot", tmp_path / "all.json") == 1
    assert "plots need matplotlib: pip install 'fusedlayers[examples]'" in capsys.readouterr().err


@pytest.fixture
def newer_record(gpu_record: Record) -> Record:
    """What a later run may have measured: one row again, and one in another direction."""
    first, second = gpu_record["rows"]
    again = {**first, "contenders": {**first["contenders"], "torch eager": entry(500, 480)}}
    facts = {"commit": "d" * 40, "dirty": False, "finished": "2026-11-21T10:00:00+00:00"}
    return gpu_record | facts | {"rows": [again, {**second, "direction": "forward"}]}


def test_rows_measured_anew_replace_their_own_and_name_their_commit(
    gpu_record: Record, newer_record: Record, tmp_path: Path
) -> None:
    older, newer, newest = (tmp_path / f"{name}.json" for name in ("older", "newer", "newest"))
    record.write(gpu_record, older)
    record.write(newer_record, newer)
    assert command("update", older, newer) == 0
    found = record.read(older)
    assert found["commit"] == "c" * 40
    anew = {"commit": "d" * 40}
    again, other = newer_record["rows"]
    assert found["rows"] == [again | anew, gpu_record["rows"][1], other | anew]
    assert "commit cccccccccc with local changes, 2 of its rows at dddddddddd." in layer_tables.markdown(found)
    # A row that was measured anew twice keeps its own commit.
    record.write(newer_record | {"commit": "e" * 40, "rows": [again | anew]}, newest)
    assert command("update", older, newest) == 0
    assert record.read(older) == found


def test_rows_may_be_timed_for_longer(gpu_record: Record, newer_record: Record, tmp_path: Path) -> None:
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    method = gpu_record["method"] | {"seconds_per_row": 0.7}
    record.write(gpu_record | {"method": method}, older)
    for seconds, status in ((0.6, 1), (1.0, 0)):
        record.write(newer_record | {"method": method | {"seconds_per_row": seconds}}, newer)
        assert command("update", older, newer) == status
    assert record.read(older)["method"] == method


def test_peak_rates_may_be_known_by_now(gpu_record: Record, newer_record: Record) -> None:
    older = gpu_record | {"device": gpu_record["device"] | {"ceilings": None}}
    found = records.updated(older, newer_record)
    assert (found["device"], len(found["rows"])) == (older["device"], 3)


def test_a_later_version_of_the_library_may_have_measured(gpu_record: Record, newer_record: Record) -> None:
    newer = newer_record | {"versions": newer_record["versions"] | {"fusedlayers": "0.3.0"}}
    found = records.updated(gpu_record, newer)
    assert (found["versions"], found["rows"][0]["commit"]) == (gpu_record["versions"], "d" * 40)


def test_a_library_that_no_row_needs_may_be_missing(gpu_record: Record, newer_record: Record) -> None:
    older = gpu_record | {"versions": gpu_record["versions"] | {"torchao": "0.18.0"}}
    assert records.updated(older, newer_record)["versions"] == older["versions"]
    with pytest.raises(ValueError, match="versions"):
        records.updated(gpu_record, newer_record | {"versions": older["versions"]})


def test_a_contender_that_has_no_times_may_go(gpu_record: Record, newer_record: Record, tmp_path: Path) -> None:
    """That one is not asked for anew, as it cannot run there."""
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    [row, *others] = gpu_record["rows"]
    untimed = record.untimed_entry("it has no layers for it", ("", ""))
    row = row | {"contenders": row["contenders"] | {"liger": untimed}}
    record.write(gpu_record | {"rows": [row, *others]}, older)
    record.write(newer_record, newer)
    assert command("update", older, newer) == 0
    assert "liger" not in record.read(older)["rows"][0]["contenders"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"torch": "2.12.0", "triton": "3.6.0"}}, "versions: expected those of the record"),
        ({"device": {"kind": "cuda", "name": "NVIDIA H100"}}, "device: expected those of the record"),
        ({"method": {"cold_cache_bytes": 0}}, "method: expected those of the record"),
        ({"finished": None}, "finished: expected a newer run that is, got None"),
        ({"commit": None}, "commit: expected one without changes, got None"),
        ({"dirty": True}, "dirty: True"),
        (lambda row: [row, row], "expected it once, green, with times"),
        (lambda row: [row | {"contenders": {}}], "expected it once, green, with times"),
        (
            lambda row: [row | {"contenders": {"auto": row["contenders"]["auto"]}}],
            "times of torch eager, torch.compile",
        ),
        (lambda row: [row | {"verification": [{"status": "red"}]}], "expected it once, green, with times"),
    ],
)
def test_a_record_is_updated_by_its_like_alone(
    gpu_record: Record, newer_record: Record, change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    record.write(gpu_record, older)
    changes = change if isinstance(change, dict) else {"rows": change(newer_record["rows"][0])}
    record.write(newer_record | changes, newer)
    before = older.read_bytes()
    assert command("update", older, newer) == 1
    assert said in capsys.readouterr().err
    assert older.read_bytes() == before


def test_a_row_that_a_budget_skipped_replaces_none(gpu_record: Record, newer_record: Record) -> None:
    row = newer_record["rows"][0]
    entries = {name: entry | {"launched": None, "replayed": None} for name, entry in row["contenders"].items()}
    skipped = newer_record | {"rows": [row | {"contenders": entries}]}
    assert records.updated(gpu_record, newer_record)["rows"] != gpu_record["rows"]
    assert records.updated(gpu_record, skipped)["rows"] == gpu_record["rows"]
    half = row["contenders"] | {name: entries[name] for name in list(entries)[1:]}
    red = {"contenders": entries, "verification": [{"status": "red"}]}
    for change in ({"contenders": half}, red):
        with pytest.raises(ValueError, match="with times of"):
            records.updated(gpu_record, newer_record | {"rows": [row | change]})


def test_half_a_record_is_refused(newer_record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "half.json"
    del newer_record["versions"]
    record.write(newer_record, path)
    assert command("update", path, path) == 1
    assert "got one without versions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("{", "expected a JSON record"), ("{}", "schema 1, got None"), ("[]", "got 'list'")],
)
def test_an_unusable_record_is_named(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    for name in ("table", "plot"):
        assert command(name, path) == 1
        error = capsys.readouterr().err
        assert str(path) in error
        assert said in error
