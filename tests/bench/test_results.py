"""What the benchmark shows: tables and plots follow the record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fusedlayers.bench import __main__ as command
from fusedlayers.bench import __main__ as command_line
from fusedlayers.bench import arguments, record, tables
from fusedlayers.bench.published import plots
from fusedlayers.bench.record import Record

ROOT = Path(__file__).resolve().parent.parent.parent


def bench(*words: object) -> int:
    return command.main([str(word) for word in words])


def entry(launched: float, replayed: float | None, **fields: Any) -> Record:
    """Times in µs."""

    def spread(median: float) -> Record:
        quartiles = {"first_quartile": 0.99 * median * 1e-6, "third_quartile": 1.01 * median * 1e-6}
        return {"median": median * 1e-6, **quartiles, "minimum": 0.0, "repeats": 9}

    return {
        "status": "timed", "reason": "", "path": None, "replayed_path": None, "host_seconds": 1e-5, "host_bound": False,
        "tflops": 1.0, "floor_share": 0.5, "saved_bytes": 3 * 2**20, "peak_bytes": 200 * 2**20,
        "launched": spread(launched),
        "replayed": None if replayed is None else spread(replayed),
    } | fields  # fmt: skip


@pytest.fixture
def gpu_record() -> Record:
    """As a GPU run would leave it: one shape where ours wins, one where torch does."""
    same = record.untimed_entry("same as auto", "auto mode chose the fused kernels", ("fused", "fused"))
    shared = {
        "case": "ffn", "grid": "ffn", "title": "FFN, gelu_tanh, bias", "letters": ["M", "K", "N"],
        "meaning": "tokens × d_model × d_ff", "dtype": "bf16", "activation": "gelu_tanh", "gated": False, "bias": True,
        "recompute": "auto", "direction": "forward_backward", "flops": 10, "bytes": 10, "floor_seconds": 33e-6,
        "verification": [], "clocks": None,
    }  # fmt: skip
    won = {
        "torch eager": entry(416, 400, host_bound=True),
        "torch.compile": entry(917, None),
        "auto": entry(208, 160, path="fused", replayed_path="fused"),
        "fused": same,
    }
    lost = {
        "torch eager": entry(1000, 990),
        "torch.compile": entry(900, 800),
        "auto": entry(1000, 1600, path="torch", replayed_path="fused"),
        "fused": entry(2000, 1900, path="fused"),
    }
    return {
        "schema": 1, "arguments": [], "started": "2026-11-20T10:00:00+00:00", "finished": None, "commit": "c" * 40,
        "dirty": True, "source_sha256": "", "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "device": {"kind": "cuda", "name": "NVIDIA H200", "ceilings": [790e12, 4.3e12]},
        "method": {"cold_cache_bytes": 1},
        "rows": [
            shared | {"shape": [131072, 64, 256], "contenders": won},
            shared | {"shape": [8192, 2048, 8192], "contenders": lost},
        ],
    }  # fmt: skip


def test_the_markdown_table_shows_wins_and_losses(gpu_record: Record) -> None:
    text = tables.markdown(gpu_record)
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0, bf16, 2026-11-20, commit cccccccccc with local changes" in text
    assert "**FFN, gelu_tanh, bias: forward + backward, bf16**" in text
    assert (
        "| 131072×64×256 | 416* / 400 | 917 / – | 208 / 160 | fused | same | 2.00 / 2.50 | 50% | 3.0 / 3.0 / 3.0 "
        "| 200 / 200 / 200 |" in text
    )
    assert (
        "| 8192×2048×8192 | 1000 / 990 | 900 / 800 | 1000 / 1600 | torch / fused | 2000 / 1900 | 0.90 / 0.50 |" in text
    )


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


def test_plots_are_made_from_the_file(gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.json"
    record.write(gpu_record, path)
    drawn: list[dict[str, list[float | None]]] = []
    draw = plots._bars

    def note(axes: Any, rows: list[Record], series: dict[str, list[float | None]], colours: dict[str, str]) -> None:
        drawn.append(series)
        draw(axes, rows, series, colours)

    monkeypatch.setattr(plots, "_bars", note)
    assert bench("plot", path) == 0
    assert (tmp_path / "all-ffn.png").stat().st_size > 10_000
    speed_ups, times = drawn
    assert speed_ups["auto mode, replayed"] == pytest.approx([2.5, 0.5])
    assert speed_ups["forced kernels, replayed"] == [None, pytest.approx(800 / 1900)]
    assert times["torch eager"] == pytest.approx([400 / 33, 990 / 33])
    assert times["torch.compile"] == pytest.approx([917 / 33, 800 / 33])


def test_plots_without_matplotlib_say_what_to_install(
    gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record.write(gpu_record, tmp_path / "all.json")
    assert bench("plot", tmp_path / "all.json") == 1
    assert "plots need matplotlib: pip install 'fusedlayers[examples]'" in capsys.readouterr().err


def test_a_wheel_says_that_it_draws_nothing(
    gpu_record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_PLOTS", None)
    record.write(gpu_record, tmp_path / "all.json")
    assert bench("plot", tmp_path / "all.json") == 1
    assert "a clone of the repository draws pictures" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench("ffn", "--time", "--plot")
    assert "argument --plot: a clone of the repository" in capsys.readouterr().err


def test_without_rich_the_table_is_plain(
    gpu_record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    arguments.show(tables.screen(gpu_record))
    assert capsys.readouterr().out == tables.screen(gpu_record).plain() + "\n"


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
    assert bench("update", older, newer) == 0
    found = record.read(older)
    assert found["commit"] == "c" * 40
    anew = {"commit": "d" * 40}
    again, other = newer_record["rows"]
    assert found["rows"] == [again | anew, gpu_record["rows"][1], other | anew]
    assert "commit cccccccccc with local changes, 2 of its rows at dddddddddd." in tables.markdown(found)
    # A row that was measured anew twice keeps its own commit.
    record.write(newer_record | {"commit": "e" * 40, "rows": [again | anew]}, newest)
    assert bench("update", older, newest) == 0
    assert record.read(older) == found


def test_rows_may_be_timed_for_longer(gpu_record: Record, newer_record: Record, tmp_path: Path) -> None:
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    method = gpu_record["method"] | {"seconds_per_row": 0.7}
    record.write(gpu_record | {"method": method}, older)
    for seconds, status in ((0.6, 1), (1.0, 0)):
        record.write(newer_record | {"method": method | {"seconds_per_row": seconds}}, newer)
        assert bench("update", older, newer) == status
    assert record.read(older)["method"] == method


def test_peak_rates_may_be_known_by_now(gpu_record: Record, newer_record: Record) -> None:
    older = gpu_record | {"device": gpu_record["device"] | {"ceilings": None}}
    found = record.updated(older, newer_record)
    assert (found["device"], len(found["rows"])) == (older["device"], 3)


def test_a_contender_that_has_no_times_may_go(gpu_record: Record, newer_record: Record, tmp_path: Path) -> None:
    """That one is not asked for anew, as it cannot run there."""
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    [row, *others] = gpu_record["rows"]
    untimed = record.untimed_entry("not timed", "it has no layers for it", ("", ""))
    row = row | {"contenders": row["contenders"] | {"liger": untimed}}
    record.write(gpu_record | {"rows": [row, *others]}, older)
    record.write(newer_record, newer)
    assert bench("update", older, newer) == 0
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
    assert bench("update", older, newer) == 1
    assert said in capsys.readouterr().err
    assert older.read_bytes() == before


def test_a_row_that_a_budget_skipped_replaces_none(gpu_record: Record, newer_record: Record) -> None:
    row = newer_record["rows"][0]
    entries = {name: entry | {"launched": None, "replayed": None} for name, entry in row["contenders"].items()}
    skipped = newer_record | {"rows": [row | {"contenders": entries}]}
    assert record.updated(gpu_record, newer_record)["rows"] != gpu_record["rows"]
    assert record.updated(gpu_record, skipped)["rows"] == gpu_record["rows"]
    half = row["contenders"] | {name: entries[name] for name in list(entries)[1:]}
    red = {"contenders": entries, "verification": [{"status": "red"}]}
    for change in ({"contenders": half}, red):
        with pytest.raises(ValueError, match="with times of"):
            record.updated(gpu_record, newer_record | {"rows": [row | change]})


def test_half_a_record_is_refused(newer_record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "half.json"
    del newer_record["versions"]
    record.write(newer_record, path)
    assert bench("update", path, path) == 1
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
        assert bench(name, path) == 1
        error = capsys.readouterr().err
        assert str(path) in error
        assert said in error
