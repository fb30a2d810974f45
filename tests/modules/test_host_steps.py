"""How many Python functions a repeated call of a module walks before its kernel: small layers are host-bound."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.kernels import launching
from tests.support.operands import needs_kernels
from tests.support.prepared_launches import Watched, launcher_of
from tests.support.stand_in_launchers import stand_in_driver

LIBRARY = (str(Path(fl.__file__).parent), str(Path(launching.__file__).parent))
# What they took when this was written, and the files in which they stand.
MOST = {"ffn": (24, 16), "linear": (18, 12)}
LAYERS = {"ffn": lambda: fl.FusedFFN(64, 128), "linear": lambda: fl.SplitKLinear(64, 48)}


@needs_kernels
@pytest.mark.parametrize("name", LAYERS)
def test_a_repeated_call_walks_few_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    calls: list[tuple[Any, ...]] = []
    launcher = launcher_of(calls, nested=True)
    Watched(launcher, monkeypatch)
    layer, x = LAYERS[name](), torch.randn(16, 64)
    with stand_in_driver(launcher), torch.no_grad():
        for _ in range(4):
            layer(x)
        calls.clear()
        walked = functions_before(layer, x, calls)
    assert len(calls) == 1
    most, most_files = MOST[name]
    assert len(walked) <= most, walked
    assert len({file for file, _ in walked}) <= most_files, walked


def functions_before(layer: nn.Module, x: torch.Tensor, calls: list[Any]) -> list[tuple[str, str]]:
    """(file, function) of this library, up to the first launch."""
    walked: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and not calls and code.co_filename.startswith(LIBRARY):
            walked.append((code.co_filename, code.co_name))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return walked
