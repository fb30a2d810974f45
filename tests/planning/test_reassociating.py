"""When a GEMM-GEMM without an activation is planned as A (B C): arithmetic alone, on every device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusedlayers.planning import Device, Problem, plan
from fusedlayers.planning.costs import gemm_units, saved_bytes
from fusedlayers.planning.reassociating import share_of_time
from tests.support.records import A100, CPU, H200, where

SMALL = Problem("gemm_gemm", batch=64, M=1024, K=64, N=1024, O=64, dtype="bfloat16")
WANTED = {"needs_data_gradient": True, "needs_weight_gradient": True}


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("ratio", [{"fused": 0.5, "reassociated": 0.6}, {"fused": 0.5, "reassociated": 0.4}], ids=str)
def test_where_it_was_measured_times_decide(ratio: dict[str, float], captured: bool) -> None:
    for problem in (replace(SMALL, captured=captured), replace(SMALL, captured=captured, **WANTED)):
        made = plan(problem, where(H200, problem, ratio))
        assert made.path == min(ratio, key=ratio.__getitem__)
        assert set(dict(made.rejected).values()) == {f"{made.path} is expected to be faster"}
        assert plan(problem, where(H200, problem, dict.fromkeys(ratio, 1.5))).path == "torch"


@pytest.mark.parametrize("device", [H200, A100, CPU], ids=["H200", "A100", "CPU"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_any_device_takes_it_for_small_inner_sizes_alone(device: Device, dtype: str) -> None:
    small = replace(SMALL, dtype=dtype)
    for problem in (small, replace(small, **WANTED)):
        assert plan(problem, device).path == "reassociated"
        for change in ({"K": 4096, "O": 4096}, {"M": 1}, {"M": 64, "N": 64}):
            made = plan(replace(problem, **change), device)
            assert made.path != "reassociated"
            share = f"{share_of_time(replace(problem, **change), device):.2f} times as "
            assert share in dict(made.rejected)["reassociated"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activation": "relu"}, "relu stands between the products"),
        ({"subclass": "DTensor"}, "an operand is a DTensor: torch's plain expression leaves most to it"),
        ({"M": 0}, "there is nothing to compute"),
        (
            {"dtype": "float16"},
            "float16: B C and its gradient may overflow where A B and the gradient of that do not",
        ),
        ({"shared_hidden": True}, "several entries of C multiply one A B"),
    ],
)
def test_what_keeps_the_order(change: dict[str, Any], why: str) -> None:
    for device in (H200, CPU):
        made = plan(replace(SMALL, **change), device)
        assert made.path != "reassociated"
        assert dict(made.rejected)["reassociated"] == why


@pytest.mark.parametrize(("backend", "path"), [("triton", "fused"), ("torch", "torch")])
def test_the_backend_keeps_the_order(backend: str, path: str) -> None:
    made = plan(SMALL, H200, backend)
    assert made.path == path
    assert dict(made.rejected)["reassociated"] == f"the backend is set to {backend}"


def test_an_ffn_does_not_know_it() -> None:
    made = plan(Problem("ffn", batch=1, M=2**16, K=64, N=256, O=64, dtype="bfloat16"), H200)
    assert "reassociated" not in {made.path, *dict(made.rejected)}


def test_the_other_paths_say_why_they_gave_way() -> None:
    """Of a device without a record."""
    made = plan(SMALL, A100)
    assert made.path == "reassociated"
    cheaper = f"A (B C) is cheaper: about {share_of_time(SMALL, A100):.2f} of the time"
    assert dict(made.rejected)["torch"].startswith(cheaper)
    assert "not measured on sm_80" in dict(made.rejected)["fused"]
    # Where the kernels cannot run, that stays their reason.
    reasons = dict(plan(SMALL, CPU).rejected)
    assert reasons["fused"].startswith("the kernels need a CUDA")
    assert reasons["torch"].startswith("A (B C) is cheaper")


def test_units_flops_and_bytes() -> None:
    problem = Problem("gemm_gemm", batch=3, M=400, K=10, N=200, O=20, dtype="float32")
    unit = 400 * 10 * 200
    down, out, back = 10 * 200 * 20, 400 * 10 * 20, 400 * 20 * 10
    data, weights = replace(problem, needs_data_gradient=True), replace(problem, needs_weight_gradient=True)
    for each, backward in (
        (problem, 0),
        (data, back),
        (weights, back + 2 * down),
        (replace(problem, **WANTED), 2 * back + 2 * down),
    ):
        found = [units * unit for units in gemm_units(each, "reassociated")]
        assert found == pytest.approx([down + out, backward])
        made = plan(each, CPU)
        assert (made.path, made.flops) == ("reassociated", pytest.approx(2 * 3 * (down + out + backward), abs=1))
        assert made.workspace_bytes == 4 * 3 * 10 * 20
    operands = 400 * 10 + 10 * 200 + 200 * 20
    assert saved_bytes(problem, "reassociated", CPU) == 0
    assert saved_bytes(data, "reassociated", CPU) == 4 * 3 * 10 * 20
    assert saved_bytes(weights, "reassociated", CPU) == 4 * 3 * operands
    assert saved_bytes(replace(problem, **WANTED), "reassociated", CPU) == 4 * 3 * (operands + 10 * 20)
