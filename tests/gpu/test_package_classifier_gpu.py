"""The classifier of packages on a GPU: its picture of split-K, and a short run in mixed precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.training_runs import train_classifier
from train_examples import split_factor

pytestmark = pytest.mark.gpu


def test_split_factors_are_timed(tmp_path: Path) -> None:
    layer = nn.Linear(4096, 64, device="cuda")
    text = split_factor.picture(32, layer, tmp_path)
    result = json.loads((tmp_path / "split_factor.json").read_text())
    assert list(result["microseconds"]) == ["torch", "auto", *(f"S = {2**power}" for power in range(5))]
    assert all(time > 0 for time in result["microseconds"].values())
    assert "S = 16" in text
    assert (tmp_path / "split_factor.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [("layers=torch",), ("layers=fused",), ("layers=fused", "layers.split_k=4")])
def test_a_run_in_mixed_precision_learns(options: tuple[str, ...], tmp_path: Path) -> None:
    longer = ("run.accelerator=cuda", "run.precision=bf16-mixed", "run.steps=60", "run.batch_size=32")
    rows = train_classifier(tmp_path, *options, *longer)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_scores"]["accuracy"] > summary["test_references"]["majority"]["accuracy"]
    assert (tmp_path / "split_factor.png").exists()
    # More of them, which share the work of a batch, would hold up the one that launches kernels.
    assert torch.get_num_threads() == 1
