"""From which sizes on auto mode takes the fused kernels of a GEMM-GEMM, launched one by one and in a CUDA graph."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from fusedlayers.planning import Device, Problem, plan

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
SM90 = replace(H200, backend="sm90")
FIGURES = H200.figures.gemm_gemm
# Of the path of one FFN, from 64 to 65,536 tokens.
MOST_CHANGES = 2


@pytest.mark.parametrize("device", [H200, SM90], ids=["generic", "sm90"])
def test_thresholds_decide_at_the_element(device: Device) -> None:
    assert FIGURES is not None
    tables = {H200: FIGURES.faster_from, SM90: FIGURES.sm90_faster_from}
    for (kind, training), rows in tables[device].items():
        assert [width for width, _ in rows] == sorted(width for width, _ in rows)
        for width, thresholds in rows:
            for captured, least in zip((False, True), thresholds, strict=True):
                # Whole tiles of hidden units. A training step that is launched one by one has thresholds of its own.
                problem = Problem(
                    "gemm_gemm" if kind == "gemm_gemm" else "ffn", batch=1, M=least // 64, K=width, N=64, O=width,
                    dtype="bfloat16", activation="relu", gated=kind == "gated ffn", captured=captured,
                    compiled=training and not captured, needs_data_gradient=training, needs_weight_gradient=training,
                )  # fmt: skip
                made = plan(problem, device)
                assert made.path == "fused", (kind, training, width)
                assert (made.forward_tiles.sm90 is not None) == (device.backend == "sm90")
                by_host = device.backend == "sm90" and kind != "gemm_gemm" and not training and not captured
                # Where it is not the fused path, the one of wider layers may be next.
                others = ("torch",) if kind == "gemm_gemm" or device.backend != "sm90" else ("torch", "epilogue")
                assert plan(replace(problem, M=least // 64 - 1), device).path in (("fused",) if by_host else others)
                if device.backend != "sm90":
                    # The wider of both sides counts, padded to a power of two; a padded y was slower.
                    assert plan(replace(problem, O=16), device).path == "fused"
                    assert plan(replace(problem, K=width // 2 + 1), device).path == "fused"
                    assert plan(replace(problem, O=width // 2 + 1), device).path == "torch"
            assert thresholds[0] >= thresholds[1], "a graph takes the launches' cost away, so it can only help"


@pytest.mark.parametrize(
    ("device", "tiles", "units"),
    [(SM90, 27, 4096), (H200, 60, 4096), (H200, 132, 4100)],  # rows of 4100 units are no whole vectors
    ids=["sm90", "generic", "uneven"],
)
def test_few_tiles_of_a_batch_leave_sms_idle(device: Device, tiles: int, units: int) -> None:
    problem = Problem(
        "gemm_gemm", tiles, M=128, K=64, N=units, O=64, dtype="bfloat16", activation="relu", captured=True
    )
    assert plan(problem, device).path == "fused"
    few = plan(replace(problem, batch=tiles - 1), device)
    assert few.path == "torch"
    assert dict(few.rejected)["fused"].startswith(f"{tiles - 1} tiles of 128 rows")


def test_half_empty_tiles_of_a_batch_are_left_to_torch() -> None:
    problem = Problem("gemm_gemm", 64, M=272, K=88, N=1280, O=88, dtype="bfloat16", activation="relu", captured=True)
    empty = plan(problem, SM90)
    assert empty.path == "torch"
    assert (
        dict(empty.rejected)["fused"] == "tiles are 2.1 times as large as what they hold: torch was as fast or faster"
    )
    for change in ({"batch": 88}, {"M": 384}, {"K": 120, "O": 120}):
        assert plan(replace(problem, **change), SM90).path == "fused", change


def test_many_gated_hidden_units_take_the_path_of_wider_layers() -> None:
    problem = Problem(
        "ffn", batch=1, M=2**16, K=256, N=1024, O=256, dtype="bfloat16", gated=True, captured=True,
        needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip
    assert plan(problem, SM90).path == "fused"
    many = replace(problem, N=1032)
    assert plan(many, SM90).path == "epilogue"
    # And those that end within a tile.
    assert plan(replace(problem, N=960), SM90).path == "fused"
    assert plan(replace(problem, N=968), SM90).path == "epilogue"
    for change in ({"gated": False}, {"K": 128, "O": 128}):
        assert plan(replace(many, **change), SM90).path == "fused", change


@pytest.mark.parametrize("captured", [False, True])
def test_a_gated_forward_pass_of_width_256_takes_the_path_of_wider_layers(captured: bool) -> None:
    problem = Problem(
        "ffn", batch=1, M=2**14, K=256, N=1032, O=256, dtype="bfloat16", gated=True, captured=captured
    )  # fmt: skip
    assert plan(problem, SM90).path == "epilogue"
    assert plan(replace(problem, K=128, O=128), SM90).path == "fused"


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_one_launch_saves_the_host_more_than_a_few_tiles_take(gated: bool) -> None:
    assert FIGURES is not None
    units = FIGURES.weights_of_one_launch[gated] // 256
    problem = Problem("ffn", batch=1, M=1, K=256, N=units, O=256, dtype="bfloat16", gated=gated)
    assert plan(problem, SM90).path == "fused"
    for change in ({"N": units + 8}, {"captured": True}, {"needs_data_gradient": True}, {"dtype": "float32"}):
        assert plan(replace(problem, **change), SM90).path == "torch", change
    assert plan(problem, H200).path == "torch"


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_hidden_units_do_not_make_up_for_rows(training: bool, captured: bool) -> None:
    """A tile of rows takes longer with more of them, and the other SMs have nothing to do."""
    problem = Problem(
        "ffn", batch=1, M=128, K=256, N=2**16, O=256, dtype="bfloat16", captured=captured, needs_data_gradient=training,
        needs_weight_gradient=training,
    )  # fmt: skip
    made = plan(problem, SM90)
    assert made.path == "torch"
    assert ("too few SMs" if captured else "2,048 hidden elements") in dict(made.rejected)["fused"]
    assert plan(replace(problem, M=2**14), SM90).path == "fused"
    # Half of them would be busy: the other path divides the hidden units among all.
    made = plan(replace(problem, M=2**13), SM90)
    assert made.path == "epilogue"
    assert "too few SMs" in dict(made.rejected)["fused"]
    # The same of a second wave, but a few tokens more must not keep many times the bytes.
    assert plan(replace(problem, M=2**14 + 1024), SM90).path == "fused"


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256, 1024])
def test_more_tokens_change_the_path_once_or_twice(width: int, gated: bool, training: bool, captured: bool) -> None:
    """And a few more keep at most twice the bytes, from one path to another, too."""
    problem = Problem(
        "ffn", batch=1, M=1, K=width, N=4 * width, O=width, dtype="bfloat16", activation="silu", gated=gated,
        captured=captured, needs_data_gradient=training, needs_weight_gradient=training,
    )  # fmt: skip
    made = [plan(replace(problem, M=tokens), SM90) for tokens in range(64, 2**16 + 1, 64)]
    assert sum(one.path != other.path for one, other in itertools.pairwise(made)) <= MOST_CHANGES
    for one, other in itertools.pairwise(made):
        if other.problem.M <= 1.01 * one.problem.M:
            assert other.saved_bytes <= 2 * one.saved_bytes, f"{one.path}, {other.problem.M:,} tokens: {other.path}"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"N": 520}, "epilogue"),
        ({"N": 520, "M": 53 * 128}, "fused"),  # 53 tiles on 132 SMs
        ({"N": 512}, "fused"),
        ({"gated": True}, "epilogue"),
        ({"gated": True, "needs_data_gradient": False, "needs_weight_gradient": False}, "fused"),
        ({"gated": True, "K": 64, "O": 64}, "fused"),
        ({"K": 64, "O": 64, "N": 960}, "fused"),
        ({"K": 64, "O": 64, "N": 968}, "epilogue"),
        ({"K": 64, "O": 64, "N": 968, "gated": True}, "fused"),
        ({"K": 64, "O": 64, "N": 968, "gated": True, "M": 19 * 128}, "epilogue"),  # 19 tiles on 132 SMs
    ],
    ids=str,
)
def test_few_rows_take_the_path_that_divides_hidden_units(change: dict[str, Any], path: str) -> None:
    problem = Problem(
        "ffn", batch=1, M=39 * 128, K=128, N=512, O=128, dtype="bfloat16", captured=True,
        needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip
    assert plan(replace(problem, **change), SM90).path == path


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("width", [24, 40, 64, 96, 128])
def test_a_graph_takes_kernels_earlier_unless_units_outnumber_rows(width: int, training: bool, gated: bool) -> None:
    """The launches are recorded, so that the device alone decides; but one tile of rows computes all hidden units."""
    assert FIGURES is not None
    launched, replayed = FIGURES.sm90_faster_from["gated ffn" if gated else "ffn", training][width > 64][1]
    assert replayed < launched
    units = 4 * (128 if width > 64 else 64)
    problem = Problem(
        "ffn", batch=1, M=replayed // units, K=width, N=units, O=width, dtype="bfloat16", captured=True, gated=gated,
        needs_data_gradient=training, needs_weight_gradient=training,
    )  # fmt: skip
    assert plan(problem, SM90).path == "fused"
    assert plan(replace(problem, M=problem.M - 1), SM90).path != "fused"
    busy = FIGURES.busy_rows <= problem.M
    assert (plan(replace(problem, N=4 * units), SM90).path == "fused") == busy
    assert plan(replace(problem, M=FIGURES.busy_rows, N=4 * units), SM90).path == "fused"


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_training_step_that_waits_for_the_host_takes_kernels_earlier(gated: bool) -> None:
    """Five launches cost the host as much as torch's ten, gated less than its fifteen. What is compiled has fewer."""
    assert FIGURES is not None
    kind = "gated ffn" if gated else "ffn"
    widest = FIGURES.sm90_faster_from[kind, True][-1]
    for width, (launched, _) in (*FIGURES.trained_from[kind], widest):
        problem = Problem(
            "ffn", batch=1, M=launched // width, K=width, N=width, O=width, dtype="bfloat16", gated=gated,
            needs_data_gradient=True, needs_weight_gradient=True,
        )  # fmt: skip
        assert plan(problem, SM90).path == "fused", width
        assert plan(replace(problem, M=problem.M - 1), SM90).path != "fused", width
        assert (plan(replace(problem, compiled=True), SM90).path == "fused") == (width == 256)
        assert plan(problem, H200).path == "torch"
