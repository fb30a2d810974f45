"""How many Python functions a repeated call walks before its kernel: small layers are host-bound."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.kernels import launching
from tests.support.operands import needs_kernels
from tests.support.prepared_launches import Watched, launcher_of
from tests.support.stand_in_launchers import stand_in_driver

LIBRARY = (str(Path(fl.__file__).parent), str(Path(launching.__file__).parent))
# What they took when this was written, and the files in which they stand.
MOST = {"FusedFFN": (19, 15), "gated": (19, 15), "SplitKLinear": (16, 10), "ffn": (19, 12), "linear": (18, 9)}


def ffn_function() -> Callable[[Tensor], Tensor]:
    w_up, w_down = torch.randn(128, 64), torch.randn(64, 128)
    return lambda x: fl.functional.ffn(x, w_up, w_down)


def linear_function() -> Callable[[Tensor], Tensor]:
    weight = torch.randn(48, 64)
    return lambda x: fl.functional.linear(x, weight)


LAYERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "FusedFFN": lambda: fl.FusedFFN(64, 128),
    "gated": lambda: fl.FusedFFN(64, 128, "silu", gated=True),
    "SplitKLinear": lambda: fl.SplitKLinear(64, 48),
    "ffn": ffn_function,
    "linear": linear_function,
}


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


def functions_before(layer: Callable[[Tensor], Tensor], x: Tensor, calls: list[Any]) -> list[tuple[str, str]]:
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
