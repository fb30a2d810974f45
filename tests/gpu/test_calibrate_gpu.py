"""Calibration on a GPU of which nothing is known: measured, recorded, and heeded by auto mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusedlayers as fl
from fusedlayers import calibrations, devices
from fusedlayers.bench import __main__ as command
from fusedlayers.functional import dispatch
from fusedlayers.functional.dispatch import decisions
from fusedlayers.planning import record as planned
from tests.support.operands import forget_calls

# The compiler of torch, which is timed here, warns of things of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def forget_everything() -> None:
    """What this process knows of devices, plans and calls."""
    devices._describe.cache_clear()
    dispatch._cached_plan.cache_clear()
    forget_calls()


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of this GPU, and the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planned, "shipped", dict)
    planned.of_device.cache_clear()
    forget_everything()
    yield
    planned.of_device.cache_clear()
    forget_everything()


@pytest.mark.usefixtures("unknown")
def test_what_was_measured_runs(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(65_536, 64, device=device, dtype=torch.bfloat16)
    w_up, w_down = (torch.randn(*sizes, device=device, dtype=torch.bfloat16) / 16 for sizes in ((256, 64), (64, 256)))

    def paths(rows: int) -> list[str]:
        with torch.no_grad(), decisions() as taken:
            fl.functional.ffn(x[:rows], w_up, w_down, activation="relu")
        return list(taken)

    assert paths(65_536) == ["ffn torch"]
    shapes = ["ffn:65536x64x256:relu", "ffn:16383x64x256:relu"]
    assert command.main(["calibrate", "--shape", *shapes]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 calls are to be measured" in said
    assert "dropped" not in said
    [record] = json.loads(calibrations.calibration_file().read_text())["records"]
    assert record["driver"]
    assert "ptxas" in record["toolchain"] or torch.version.hip
    assert len(record["entries"]) == 4, "forward alone and with backward"
    for entry in record["entries"]:
        assert len(entry["launched"]) > 1
        assert len(entry["replayed"]) > 1
        if entry["kin"] == "ffn":
            name = min(entry["launched"], key=entry["launched"].__getitem__)
            ratio = entry["launched"][name] / entry["launched"]["torch"]
            if not 0.95 < ratio < 1.05:
                assert paths(entry["sizes"][0]) == [f"ffn {'torch' if name == 'torch' else 'fused'}"]
