"""The planner, with integers alone: which path, why not the others, tiles, splits, chunks, costs."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies

from fusedlayers import planning
from fusedlayers.kernels import tuning
from fusedlayers.kernels.tuning import TileConfig
from fusedlayers.planning import Device, Plan, Problem, plan
from tests.support.records import A100, CPU, where

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
MI300 = Device("cuda", "AMD Instinct MI300X", "gfx942", sms=304, triton=True)
SM90 = replace(H200, backend="sm90")
NO_TRITON = replace(H200, triton=False)
DEVICES = [H200, SM90, A100, MI300, NO_TRITON, CPU]

INFERENCE = Problem("ffn", batch=1, M=131_072, K=128, N=512, O=128, dtype="bfloat16", activation="gelu_tanh")
NARROW = {"M": 1_048_576, "K": 64, "N": 256, "O": 64}
TRAINING = replace(INFERENCE, **NARROW, needs_data_gradient=True, needs_weight_gradient=True)
WIDE = replace(TRAINING, K=1024, O=1024)
BATCHED = Problem("gemm_gemm", batch=128, M=1024, K=128, N=1024, O=128, dtype="bfloat16", activation="relu")


def paths(problem: Problem) -> set[str]:
    """What a call is asked about; chunks are for recompute=True alone."""
    return {"fused", "torch", "epilogue" if problem.operation == "ffn" else "reassociated"}


def rejections(made: Plan) -> dict[str, str]:
    return dict(made.rejected)


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        (TRAINING, Device("mps", "mps"), "the kernels need a CUDA or ROCm GPU, and the tensors are on device type mps"),
        (replace(TRAINING, subclass="DTensor"), H200, "an operand is a DTensor"),
        (replace(TRAINING, dtype="float8_e4m3fn"), H200, "not float8_e4m3fn"),
        (replace(TRAINING, M=0), H200, "there is nothing to compute"),
        (replace(BATCHED, batch=0), H200, "there is nothing to compute"),
        (replace(TRAINING, K=512, O=512), H200, "width 512 (padded 512) of bfloat16 does not fit on chip in forward"),
        (replace(TRAINING, O=257), H200, "width 257 (padded 512) of bfloat16 does not fit on chip"),
        (replace(TRAINING, K=129, O=129, dtype="float32"), H200, "width 129 (padded 256) of float32 does not fit"),
        (TRAINING, MI300, "not measured on gfx942"),
        # What was measured there was measured in kernels that do not run.
        (TRAINING, H200, "not measured on sm_90"),
        (TRAINING, where(SM90, INFERENCE, {"fused": 0.5}), "nothing like it was measured"),
    ],
)
def test_torch_runs_elsewhere_and_the_plan_says_why(problem: Problem, device: Device, reason: str) -> None:
    made = plan(problem, device)
    assert made.path == "torch"
    assert reason in rejections(made)["fused"]
    assert "torch" not in rejections(made)
    # Under recompute=True the memory promise decides instead of speed.
    kept = plan(replace(problem, recompute=True), device)
    if problem.operation == "gemm_gemm" or problem.empty or problem.subclass:
        assert kept.path == "torch"
    elif device.record is not None and problem.dtype == "bfloat16" and "nothing like it" not in reason:
        assert kept.path == "fused"
    else:
        assert kept.path == "chunked"
        assert reason in rejections(kept)["fused"]


@pytest.mark.parametrize(
    ("problem", "device", "reasons"),
    [
        (
            INFERENCE,
            where(SM90, INFERENCE, {"fused": 0.5, "epilogue": 0.8}),
            dict.fromkeys(("epilogue", "torch"), "fused is expected to be "),
        ),
        # A path without a time is not taken, whatever others take.
        (
            INFERENCE,
            where(SM90, INFERENCE, {"epilogue": 0.8}),
            {"fused": "nothing like it was measured", "torch": "epilogue is expected to be "},
        ),
        (
            replace(TRAINING, recompute=True),
            SM90,
            dict.fromkeys(("epilogue", "torch"), "recompute=True forbids keeping the hidden"),
        ),
        (replace(TRAINING, recompute=False), CPU, dict.fromkeys(("fused", "epilogue"), "the kernels need a CUDA")),
        (
            replace(BATCHED, recompute=True),
            CPU,
            {"fused": "the kernels need a CUDA", "reassociated": "relu stands between the products"},
        ),
        (
            WIDE,
            where(SM90, WIDE, {"epilogue": 0.5}),
            {"fused": "does not fit on chip", "torch": "epilogue is expected to be "},
        ),
    ],
)
def test_every_path_not_taken_has_its_reason(problem: Problem, device: Device, reasons: dict[str, str]) -> None:
    made = plan(problem, device)
    found = rejections(made)
    assert found.keys() == reasons.keys() == paths(problem) - {made.path}
    for path, words in reasons.items():
        assert words in found[path]
    assert made.reason


@pytest.mark.parametrize("problem", [INFERENCE, replace(TRAINING, recompute=True)])
def test_the_backend_is_a_wish_that_the_plan_heeds(problem: Problem) -> None:
    small = replace(problem, M=3, dtype="float32")
    assert plan(small, A100, "triton").path == "fused"
    assert plan(small, A100, "auto").path == ("chunked" if problem.recompute is True else "torch")
    made = plan(problem, H200, "torch")
    assert made.path == ("chunked" if problem.recompute is True else "torch")
    assert rejections(made)["fused"] == "the backend is set to torch"
    # What cannot run does not, and the plan keeps the reason for whoever must raise an error.
    impossible = plan(problem, CPU, "triton")
    assert impossible.path != "fused"
    assert impossible.unsupported == "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu"
    assert plan(problem, A100).unsupported is None


def test_only_the_kernels_that_will_run_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {"forward": TileConfig(64, 64, 4, 2), "data_gradient": None, "weight_gradient": TileConfig(32, 32, 4, 1)}
    monkeypatch.setattr(planning.gemm_gemm_tiles, "tile_config", lambda kernel, *rest: tiles[kernel])
    assert planning.gemm_gemm.why_unsupported(INFERENCE, H200) is None
    assert planning.gemm_gemm.why_unsupported(replace(INFERENCE, needs_weight_gradient=True), H200) is None
    reason = planning.gemm_gemm.why_unsupported(replace(INFERENCE, needs_data_gradient=True), H200)
    assert reason == "width 128 (padded 128) of bfloat16 does not fit on chip in data_gradient"


def test_tiles_are_those_of_the_table_and_of_the_kernels_that_run() -> None:
    made = plan(TRAINING, H200, "triton")
    for kernel in ("forward", "data_gradient", "weight_gradient"):
        expected = tuning.tile_config(kernel, "sm_90", 16, False, 64)
        assert expected is not None
        assert getattr(made, f"{kernel}_tiles") == expected
    forward = plan(INFERENCE, H200, "triton")
    assert (forward.data_gradient_tiles, forward.weight_gradient_tiles) == (None, None)
    only_x = plan(replace(TRAINING, needs_weight_gradient=False), H200, "triton")
    assert (only_x.weight_gradient_tiles, only_x.splits, only_x.workspace_bytes) == (None, 1, 0)
    gated = plan(replace(TRAINING, gated=True), H200, "triton")
    assert gated.forward_tiles == tuning.tile_config("forward", "sm_90", 16, True, 64)


@pytest.mark.parametrize(
    ("device", "dtype", "accuracy"),
    [
        (H200, "bfloat16", "coarse"),
        (A100, "bfloat16", "coarse"),
        (MI300, "bfloat16", "half"),
        (H200, "float16", "half"),
        (H200, "float32", "exact"),
    ],
)
def test_activations_are_as_accurate_as_the_dtype_asks(device: Device, dtype: str, accuracy: str) -> None:
    assert plan(replace(TRAINING, K=64, O=64, dtype=dtype), device, "triton").accuracy == accuracy


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 65, 128, 255, 256])
def test_padded_widths(width: int) -> None:
    padded = tuning.padded_width(width)
    assert padded >= max(width, 16)
    assert padded & (padded - 1) == 0
    assert padded == 16 or padded < 2 * width


def test_the_table_is_in_order_and_complete() -> None:
    for (architecture, bits, gated), kernels in tuning.gemm_gemm.TABLE.items():
        assert kernels.keys() == {"forward", "data_gradient", "weight_gradient"}
        for kernel, rows in kernels.items():
            widths = [width for width, _ in rows]
            assert widths == sorted(set(widths))
            for width, tiles in rows:
                assert tuning.tile_config(kernel, architecture, bits, gated, width) == tiles
                assert tuning.tile_config(kernel, architecture, bits, gated, width // 2 + 1) == tiles
                for size in (width, tiles.block_m, tiles.block_n, tiles.num_warps):
                    assert size & (size - 1) == 0
                assert min(tiles.block_m, tiles.block_n) >= 16
                assert tiles.passes in ((1, 2, 3) if kernel == "weight_gradient" else (1,))
            assert tuning.tile_config(kernel, architecture, bits, gated, widths[-1] + 1) is None
        assert ("other", bits, gated) in tuning.gemm_gemm.TABLE


# Splits of the weight gradient.


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (64 * 4, 64, 1),  # four row tiles are one split
        (64 * 4 + 1, 64, 2),
        (64 * 400, 64, 100),  # a split for every four row tiles
        (64 * 4000, 64, 264),  # one program per SM and accumulator
        (64 * 4000, 64 * 8, 33),
        (64 * 4000, 64 * 8 - 63, 33),
        (64 * 4000, 64 * 132, 2),
        (64 * 4000, 64 * 264, 1),
        (64 * 4000, 64 * 1000, 1),
        (1, 1, 1),
    ],
)
def test_splits_fill_the_processors(rows: int, columns: int, expected: int) -> None:
    problem = replace(TRAINING, M=rows, N=columns, K=16, O=16)
    assert planning.gemm_gemm.choose_splits(problem, H200, TileConfig(64, 64, 4, 2)) == expected


def test_splits_count_the_batch_and_the_warps() -> None:
    problem = replace(BATCHED, M=64 * 4000, N=64, batch=8)
    assert planning.gemm_gemm.choose_splits(problem, H200, TileConfig(64, 64, 4, 2)) == 33
    assert planning.gemm_gemm.choose_splits(problem, H200, TileConfig(64, 64, 8, 2)) == 16


PROBLEMS = strategies.builds(
    Problem,
    operation=strategies.sampled_from(["ffn", "gemm_gemm"]),
    batch=strategies.sampled_from([0, 1, 7, 70_000]),
    M=strategies.integers(0, 2**24),
    K=strategies.integers(0, 600),
    N=strategies.integers(0, 2**18),
    O=strategies.integers(0, 600),
    dtype=strategies.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    activation=strategies.sampled_from(["identity", "gelu"]),
    gated=strategies.booleans(),
    dropout=strategies.booleans(),
    needs_data_gradient=strategies.booleans(),
    needs_weight_gradient=strategies.booleans(),
    recompute=strategies.sampled_from(["auto", True, False]),
    captured=strategies.booleans(),
).filter(lambda problem: problem.operation == "gemm_gemm" or problem.batch == 1)


@hypothesis.given(PROBLEMS, strategies.sampled_from(DEVICES), strategies.sampled_from(planning.BACKENDS))
def test_every_plan_keeps_the_rules(problem: Problem, device: Device, backend: str) -> None:
    made = plan(problem, device, backend)
    assert made == plan(problem, device, backend)
    assert {made.path, *rejections(made)} == paths(problem) | {made.path}
    assert all(rejections(made).values())
    assert len(made.rejected) == len(rejections(made))
    assert made.path not in rejections(made)
    assert (made.path in ("fused", "epilogue")) <= (made.unsupported is None)
    # Nothing that keeps the hidden, or what it is made of, runs with recompute=True.
    if problem.recompute is True and problem.operation == "ffn" and not problem.empty:
        assert made.path in ("fused", "chunked")
    if made.path == "chunked":
        assert (made.epilogue is None) or device.triton
    else:
        assert (made.epilogue is None) == (made.path != "epilogue")
    if made.path == "epilogue":
        assert device.triton
        assert (made.epilogue.gradient is None) == (not problem.training)
        # Rows of pre-activations are whole sectors of 32 bytes, unless torch computes them.
        row = problem.N * problem.element_bytes
        row = -(-row // 32) * 32 if made.epilogue.hidden_tiles.block_inner else row
        kept = (2 if problem.gated else 1) * problem.M * row + problem.element_bytes * problem.M * problem.K
        assert made.saved_bytes == (kept if problem.training else 0)
        if made.epilogue.gradient is not None:
            assert made.epilogue.gradient.workspace_bytes <= planning.devices.PARTIALS_LIMIT
    if made.path == "fused":
        assert device.triton
        assert made.forward_tiles is not None
        assert (made.data_gradient_tiles is None) == (not problem.needs_data_gradient)
        assert (made.weight_gradient_tiles is None) == (not problem.needs_weight_gradient)
        partials = 4 * (problem.weight_elements + 2 * problem.N * problem.batch)
        assert made.splits >= 1
        assert made.splits == 1 or made.splits * partials <= planning.devices.PARTIALS_LIMIT == 128 * 2**20
        assert made.workspace_bytes == (made.splits * partials if made.splits > 1 else 0)
        if made.weight_gradient_tiles is not None:
            assert made.splits <= max(1, -(-problem.M // made.weight_gradient_tiles.block_m))
    assert (made.chunks is None) == (made.path != "chunked")
    if made.chunks is not None:
        assert problem.recompute is True
        assert 1 <= made.chunks.rows <= max(1, problem.M // 2)
        assert (made.chunks.columns > 0) == problem.training
        # Nothing holds the whole hidden, but that of a single unit.
        assert made.chunks.columns < problem.N or problem.N == 1
        x = problem.element_bytes * problem.M * max(problem.K, 8)
        assert made.workspace_bytes <= max(8 * x, 256 * 2**20)
    assert made.flops >= 0
    assert made.bytes >= 0
    assert (made.saved_bytes > 0) <= problem.training
    assert (made.backward_units > 0) <= problem.training


def test_the_workspace_of_many_tokens_does_not_loosen_the_bound_of_partial_sums() -> None:
    """On a device of so many SMs that these would be used for splits without it."""
    problem = replace(TRAINING, M=2**20, K=256, N=2048, O=256, recompute=True)
    made = plan(problem, replace(DEVICES[0], sms=4096), "triton")
    assert made.path == "fused"
    assert 1 < made.splits <= planning.devices.PARTIALS_LIMIT // problem.partial_bytes


def test_a_budget_of_saved_bytes() -> None:
    """The fastest path where it fits, else what recompute=True takes; the plan is of the problem with the limit."""
    problem = replace(TRAINING, M=16_384, K=1024, N=4096, O=1024)
    fastest, least = plan(problem, H200), plan(replace(problem, recompute=True), H200)
    assert fastest.saved_bytes > least.saved_bytes > 2
    for limit, expected in ((fastest.saved_bytes, fastest), (fastest.saved_bytes - 1, least), (2, least)):
        limited = replace(problem, saved_limit=limit)
        made = plan(limited, H200)
        assert made.problem == limited
        assert (made.path, made.saved_bytes, made.chunks) == (expected.path, expected.saved_bytes, expected.chunks)
    assert f"would save {fastest.saved_bytes:,} bytes of 2 allowed" in made.reason
