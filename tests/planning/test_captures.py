"""The sizes of the tests of captures: on an H200 there are some at which only a recorded call takes kernels."""

from __future__ import annotations

import pytest

from fusedlayers.planning import Device
from tests.gpu.captured_calls import CALLS, CapturedCall

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
FLAT = {f"{group}, {name}": call for group, calls in CALLS.items() for name, call in calls.items()}


@pytest.mark.parametrize("call", FLAT.values(), ids=FLAT)
def test_there_are_sizes_between_the_thresholds(call: CapturedCall) -> None:
    shape = call.shape_between(H200)
    assert shape is not None
    kernels = {"linear_cross_entropy": "chunked"}.get(call.case.name, "fused")
    if shape[1] in (256, 1024) and call.case.name == "ffn":
        kernels = "epilogue"
    assert call.paths(shape, H200) == (call.launched, kernels)


def test_elsewhere_there_are_none() -> None:
    for call in FLAT.values():
        assert call.shape_between(Device("cpu", "cpu")) is None
