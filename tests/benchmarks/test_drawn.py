"""The benchmark of random sizes: what is drawn, and what its table is made from."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import drawn, side_by_side
from fusedlayers.bench.cases import CASES
from fusedlayers.bench.runner import Row, Settings


@pytest.mark.parametrize("family", drawn.FAMILIES)
def test_sizes_lie_between_the_published_ones_and_come_again(family: str) -> None:
    case = CASES[family]
    rows = list(drawn.drawn(case, 30, seed=1))
    assert rows == list(drawn.drawn(case, 30, seed=1))
    assert {row.shape for row in rows} != {row.shape for row in drawn.drawn(case, 30, seed=2)}
    assert {row.grid.name for row in rows} == {grid.name for grid in case.grids}
    published = list(zip(*(shape for grid in case.grids for shape in grid.shapes), strict=True))
    for row in rows:
        assert all(min(known) <= size <= max(known) for size, known in zip(row.shape, published, strict=True))
        most = max(case.forward_flops(shape, row.options) for shape in row.grid.shapes)
        assert case.forward_flops(row.shape, row.options) <= most


def timed(seconds: float, path: str | None = None) -> dict[str, Any]:
    launched = {"median": seconds, "first_quartile": 0.99 * seconds, "third_quartile": 1.01 * seconds}
    return {"status": "timed", "path": path, "replayed_path": path, "launched": launched, "replayed": None}


def record(ours: float) -> dict[str, Any]:
    contenders = {"torch eager": timed(1.2e-3), "torch.compile": timed(1e-3), "auto": timed(ours, "fused")}
    row = {"case": "ffn", "grid": "ffn", "shape": [64, 32, 16], "direction": "forward", "contenders": contenders}
    return {
        "rows": [drawn._short(row)], "device": {"name": "a GPU"}, "versions": {"torch": "2.11", "triton": "3.6"},
        "started": "2026-01-01T00:00:00", "commit": "0123456789ab", "method": {"seed": 3},
    }  # fmt: skip


def test_the_table_tells_ours_from_the_best_of_torch() -> None:
    fast, slow = record(0.5e-3), record(1.25e-3)
    text = drawn.markdown(slow)
    assert "| ffn | forward | launched | 1 | 1 | 2.00 | 2.00 | 2.00 | 0 | 0 | 1.00 | 1.00 |" in drawn.markdown(fast)
    assert "| ffn | forward | launched | 1 | 1 | 0.80 | 0.80 | 0.80 | 1 | 0 | 1.25 | 1.25 |" in text
    assert "replayed |" not in text
    assert "the seed 3" in text
    assert "processes" not in text
    assert text.index("<details>") < text.index("- ffn 64×32×16 forward, launched: 0.80 of torch.compile's speed")
    fast["method"]["processes"] = 15
    assert "15 processes compiled" in drawn.markdown(fast)
    assert "<details>" not in drawn.markdown(fast)
    assert "0123456789" in text
    assert drawn.slower_than_torch(fast) == []
    expected = "ffn 64×32×16 forward, launched: 0.80 of torch.compile's speed (fused path)"
    assert drawn.slower_than_torch(slow) == [expected]


def test_times_within_the_noise_are_not_slower() -> None:
    noisy = record(1.04e-3)
    noisy["rows"][0]["launched"]["beyond_noise"] = False
    assert drawn.slower_than_torch(noisy) == []


def test_a_size_that_is_left_to_torch_wrongly_is_named() -> None:
    """Where kernels were timed and are faster by more than the noise; where auto mode runs them there is no choice."""

    def left(kernels: float, path: str = "torch") -> dict[str, Any]:
        contenders = {"torch eager": timed(1e-3), "torch.compile": timed(1.1e-3), "auto": timed(1e-3, path)}
        contenders |= {"fused": timed(kernels, "fused")}
        row = {"case": "ffn", "grid": "ffn", "shape": [64, 32, 16], "direction": "forward", "contenders": contenders}
        return record(1e-3) | {"rows": [drawn._short(row)]}

    wrong = left(0.5e-3)
    assert drawn.left_to_torch(wrong) == ["ffn 64×32×16 forward, launched: auto 1000 µs, kernels 500 µs (fused path)"]
    assert drawn.table(wrong).rows[0][-3:] == ("1", "2.00", "2.00")
    assert "left to torch though kernels are faster</summary>\n\n- ffn 64×32×16" in drawn.markdown(wrong)
    for right in (left(1.5e-3), left(0.98e-3), left(0.5e-3, "fused")):
        assert drawn.left_to_torch(right) == []
        assert drawn.table(right).rows[0][-3] == "0"
    assert left(0.5e-3, "fused")["rows"][0]["launched"]["kernels"] is None
    del wrong["rows"][0]["launched"]["kernels"]
    assert drawn.table(wrong).rows[0][-3:] == ("–", "–", "–")
    assert drawn.left_to_torch(wrong) == []


def test_kernels_are_timed_wherever_they_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Settings] = []

    def measured(measure: Any, jobs: Any, processes: int) -> Iterator[Any]:
        seen.append(measure.args[0])
        return iter(())

    monkeypatch.setattr(side_by_side, "measured", measured)
    monkeypatch.setattr(drawn, "chosen_gpu", lambda *given: torch.device("cuda", 0))
    monkeypatch.setattr(drawn, "record_path", lambda *given: tmp_path / "drawn.json")
    monkeypatch.setattr(drawn.records, "new_record", lambda *given: record(1e-3) | {"rows": []})
    assert drawn.main(["--sizes", "1"]) == 0
    assert seen[0].contenders == ("torch eager", "torch.compile", "auto", "fused")


def test_nothing_measured_is_an_empty_table() -> None:
    assert drawn.table(record(1e-3) | {"rows": []}).rows == ()


def test_who_is_timed_has_the_gpu_alone() -> None:
    """Threads stand in for processes: both have the same locks."""
    turns, inside, counting, seen = side_by_side.Turns(threading, 4), Counter(), threading.Lock(), []

    def work(kind: str) -> None:
        for _ in range(20):
            with getattr(turns, kind)():
                with counting:
                    inside[kind] += 1
                    seen.append(dict(inside))
                time.sleep(1e-3)
                with counting:
                    inside[kind] -= 1

    threads = [threading.Thread(target=work, args=[kind]) for kind in ("shared", "shared", "alone", "alone")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert any(each.get("shared") == 2 for each in seen)
    assert all(each["alone"] == 1 and not each.get("shared") for each in seen if each.get("alone"))


@pytest.mark.parametrize("several", [False, True])
def test_a_size_is_verified_and_timed(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, cpu = CASES["weight_gradient"], torch.device("cpu")
    row = Row(case, case.grids[0], case.grids[0].options, (40, 16, 24))
    monkeypatch.setattr(drawn, "drawn", lambda case, sizes, seed: iter([row]))
    monkeypatch.setattr(side_by_side, "_turns", side_by_side.Turns(threading, 2) if several else None)
    contenders = ("torch eager", "auto")
    settings = Settings("fp32", cpu, seed=3, timed=True, contenders=contenders, seconds=0.01)
    rows, green, said = drawn._measured(settings, None, case.name, 0)
    assert green
    assert said == f"timed  {row.label}"
    assert [each["launched"]["path"] for each in rows] == ["torch"]
    assert drawn._measured(settings, time.time() - 1, case.name, 0) == (
        [],
        True,
        f"skip   {row.label}: the budget was spent",
    )
    red = {"status": "red"}
    monkeypatch.setattr(drawn, "measured_alone", lambda *given: [{"verification": [red]}])
    assert drawn._measured(settings, None, case.name, 0) == ([], False, f"RED    {row.label}: {red}")


def test_jobs_are_done_in_processes() -> None:
    """Which take turns, where there are several of them."""
    for processes in (1, 2):
        found = dict(side_by_side.measured(math.gcd, [(4, 6), (9, 6), (5, 7)], processes))
        assert found == {(4, 6): 2, (9, 6): 3, (5, 7): 1}
    assert side_by_side.turns() is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "0"], "argument --processes: 0"),
        (["--sizes", "0"], "argument --sizes: 0"),
        (["--plot"], "unrecognized arguments: --plot"),
    ],
)
def test_what_it_cannot_do_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drawn.main(words)
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert drawn.main(["--sizes", "1"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
