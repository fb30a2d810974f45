"""Records of a test's own, so that what it asserts depends on no number that is shipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusedlayers.planning import Call, Device
from fusedlayers.planning.record import TORCH, Record, Row

# What planning knows of a GPU with warp-specialised kernels, of one with generic kernels alone, and of a CPU.
H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
A100 = Device("cuda", "NVIDIA A100", "sm_80", sms=108, triton=True)
CPU = Device("cpu", "cpu")
TORCH_SECONDS = 1e-3
# Beside the sizes of the problem: fewer and more of its rows.
AROUND = (0.25, 1, 4)


def rows(
    problem: Call, launched: Mapping[str, float], replayed: Mapping[str, float] | None = None, sure: bool = False
) -> list[Row]:
    """Rows around ``problem``: by path's name on record, how many times as long as torch it takes."""
    first, *rest = problem.sizes
    times = [
        {TORCH: TORCH_SECONDS, **{path: TORCH_SECONDS * ratio for path, ratio in ratios.items()}}
        for ratios in (launched, launched if replayed is None else replayed)
    ]
    return [
        Row(problem.recorded_kin, problem.variant, (max(1, round(first * share)), *rest), *times, sure=sure)
        for share in AROUND
    ]


def where(
    device: Device, problem: Call, launched: Mapping[str, float], replayed: Mapping[str, float] | None = None
) -> Device:
    """``device`` with a record of ``problem`` alone: by path, how many times as long as torch it takes."""
    named = [
        None if ratios is None else {problem.recorded(path, device): ratio for path, ratio in ratios.items()}
        for ratios in (launched, replayed)
    ]
    assert named[0] is not None
    return replace(device, override=Record(rows(problem, named[0], named[1])))
