"""Which path a weight gradient takes, with which tiles and splits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusedlayers.kernels.tuning import PIPELINES, SHARED_MEMORY
from fusedlayers.kernels.tuning.limits import BARRIER_BYTES
from fusedlayers.planning import Device, WeightGradientProblem, plan
from fusedlayers.planning.devices import PARTIALS_LIMIT
from fusedlayers.planning.weight_gradient import choose_pipeline, sm90_seconds, tile_count
from tests.support.records import A100, H200, where

COSTS = H200.tile_costs
LARGE = WeightGradientProblem(M=65_536, O=1024, K=256, dtype="bfloat16")
PUBLISHED = [(8192, 4096, 1024), (65536, 1024, 256), (131072, 512, 128), (131072, 256, 256), (16384, 4096, 4096)]


def problem(M: int, O: int, K: int) -> WeightGradientProblem:
    return WeightGradientProblem(M=M, O=O, K=K, dtype="bfloat16")


@pytest.mark.parametrize("captured", [False, True])
def test_of_a_layers_backward_pass_both_times_count_unless_it_is_replayed(captured: bool) -> None:
    layer = replace(LARGE, captured=captured, layer=True)
    for launched, replayed in ((0.5, 1.5), (1.5, 0.5)):
        both = where(H200, layer, {"fused": launched}, {"fused": replayed})
        assert plan(layer, both).path == ("fused" if captured and replayed < 1 else "torch")


def test_a_kernel_adds_up_dy_beside_torchs_product() -> None:
    device = where(H200, LARGE, {"fused": 0.9, "sums": 0.8})
    made = plan(LARGE, device)
    assert (made.path, made.tiles, made.workspace_bytes) == ("sums", None, 0)
    assert set(dict(made.rejected).values()) == {"sums is expected to be faster"}
    assert made.summary(device) == "Runs through torch, with the sums in a kernel: a kernel adds up dy."
    # Of calls by themselves alone was it measured, with both gradients.
    for change in ({"layer": True}, {"training": True}):
        assert plan(replace(LARGE, **change), device).path == "fused", change
    for change in ({"bias": False}, {"dtype": "float32"}):
        assert plan(replace(LARGE, **change), device).path == "torch", change
    assert plan(LARGE, device, "torch").path == "torch"
    assert plan(LARGE, device, "triton").path == "fused"


def test_costs() -> None:
    made = plan(LARGE, H200, "triton")
    assert made.flops == 2 * 65_536 * 1024 * 256
    assert made.bytes == 2 * (65_536 * (1024 + 256) + 1024 * 257)
    assert made.saved_bytes == 0
    assert made.workspace_bytes == made.splits * 4 * 1024 * 257
    assert made.floor_seconds == pytest.approx(made.flops / 790e12)
    assert plan(replace(LARGE, training=True), H200, "triton").saved_bytes == 2 * 65_536 * (1024 + 256)
    assert plan(replace(LARGE, bias=False), H200, "triton").bytes == 2 * (65_536 * (1024 + 256) + 1024 * 256)


@pytest.mark.parametrize("sizes", PUBLISHED, ids=str)
def test_published_shapes_fill_the_device(sizes: tuple[int, int, int]) -> None:
    """One wave of programs, or so many that the last one is nearly full."""
    made = plan(problem(*sizes), H200, "triton")
    programs = tile_count(made.problem, made.pipeline) * made.splits
    assert programs / (132 * math.ceil(programs / 132)) > 0.95
    assert made.pipeline.programs == 132


@pytest.mark.parametrize(
    ("sizes", "tile", "splits"),
    [
        # The larger tile where products decide, the one with the smaller partials where memory does.
        ((8192, 4096, 1024), (128, 256), 1),
        ((65536, 1024, 256), (128, 256), 16),
        ((65536, 2048, 384), (256, 128), 11),
        ((131072, 512, 128), (128, 128), 33),
        ((100, 8, 8), (128, 128), 1),
    ],
    ids=str,
)
def test_the_choice_of_tile_and_splits(sizes: tuple[int, int, int], tile: tuple[int, int], splits: int) -> None:
    pipeline, chosen = choose_pipeline(problem(*sizes), 132, COSTS)
    assert (pipeline.tile, chosen) == (tile, splits)


def test_the_expected_time_grows_with_waves_and_with_splits() -> None:
    large = PIPELINES[0]
    one_wave = sm90_seconds(problem(65_536, 128 * 132, 256), large, 1, 132, COSTS)
    two_waves = sm90_seconds(problem(65_536, 128 * 133, 256), large, 1, 132, COSTS)
    assert 1.9 * one_wave < two_waves < 2.1 * one_wave
    # 8 tiles: 17 splits need a second wave.
    times = [sm90_seconds(LARGE, large, splits, 132, COSTS) for splits in (1, 2, 8, 16)]
    assert times == sorted(times, reverse=True)
    assert sm90_seconds(LARGE, large, 17, 132, COSTS) > times[-1]


@pytest.mark.parametrize("device", [H200, replace(H200, backend="generic"), A100], ids=["sm90", "sm_90", "sm_80"])
def test_splits_and_partials_are_bounded(device: Device) -> None:
    for M in (1, 63, 64, 257, 4096, 2**20, 2**26):
        for O in (1, 8, 129, 1000, 4096, 2**15):
            for K in (8, 256, 2**13):
                made = plan(problem(M, O, K), device, "triton")
                assert made.splits >= 1
                assert made.workspace_bytes <= PARTIALS_LIMIT == 128 * 2**20
                assert made.splits == 1 or made.splits <= math.ceil(M / 128)


def test_rings_fit_in_shared_memory() -> None:
    for pipeline in PIPELINES:
        units, columns = pipeline.tile
        ring = 2 * pipeline.stages * pipeline.rows * (units + columns)
        assert ring + BARRIER_BYTES + 16 * 1024 <= SHARED_MEMORY
        assert units * columns // (128 * pipeline.consumers) <= 128, "registers of a consumer's sums"


def test_float32_takes_the_generic_kernel() -> None:
    made = plan(replace(LARGE, dtype="float32"), H200, "triton")
    assert made.path == "fused"
    assert made.pipeline is None
    assert made.tiles.block_m == 32
