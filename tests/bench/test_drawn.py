"""The benchmark of random sizes: what is drawn, and what its table is made from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedlayers.bench.cases import CASES
from fusedlayers.bench.published import drawn


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
    assert "| ffn | forward | launched | 1 | 1 | 2.00 | 2.00 | 2.00 | 0 |" in drawn.markdown(fast)
    assert "| ffn | forward | launched | 1 | 1 | 0.80 | 0.80 | 0.80 | 1 |" in text
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


def test_nothing_measured_is_an_empty_table() -> None:
    assert drawn.table(record(1e-3) | {"rows": []}).rows == ()


@pytest.mark.parametrize(
    ("words", "said"), [(["--sizes", "0"], "argument --sizes: 0"), (["--plot"], "argument --plot")]
)
def test_what_it_cannot_do_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drawn.main(words)
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert drawn.main(["--sizes", "1"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
