"""Which warp-specialised kernels a reduction of a product is planned with, as numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusedlayers.kernels.tuning import Sm90ReduceConfig, one_hot_pipeline, sm90_reduce_config
from fusedlayers.kernels.tuning.limits import BARRIER_BYTES, CONSUMER_ROWS, SHARED_MEMORY
from fusedlayers.planning import Device, ReducePlan, ReduceProblem, plan
from fusedlayers.planning.devices import PARTIALS_LIMIT
from tests.support.records import H200, where

PROBLEM = ReduceProblem(batch=64, kept=1024, reduced=1024, K=128, dtype="bfloat16", op="max")
SIZES = [1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 127, 129, 200, 300, 431, 512, 767, 1024, 2048, 4096]


def planned(problem: ReduceProblem) -> ReducePlan:
    made: ReducePlan = plan(problem, H200, "triton")
    assert made.path == "fused"
    return made


def shared_bytes(config: Sm90ReduceConfig) -> int:
    kept = 2 * config.consumers * CONSUMER_ROWS * config.width * config.kept_stages
    return kept + 2 * config.block * config.width * config.stages + BARRIER_BYTES


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("K", [8, 64, 72, 128])
def test_configurations_fit_on_chip(K: int, costly: bool) -> None:
    for size in SIZES:
        for other in (32, 300, 1024):
            for P, R in ((size, other), (other, size)):
                config = sm90_reduce_config(P, R, K, 132, costly)
                assert shared_bytes(config) <= SHARED_MEMORY
                assert config.stages >= 2
                assert config.width >= K
    assert sm90_reduce_config(1024, 1024, K + 1, 132, costly) is None
    assert sm90_reduce_config(1024, 1024, 136, 132, costly) is None


@pytest.mark.parametrize("axis", ["kept", "reduced"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch", [1, 8, 64, 1000])
@pytest.mark.parametrize("other", [32, 300, 1024])
def test_few_variants_are_compiled(batch: int, other: int, training: bool, axis: str) -> None:
    """Of each kernel at most three, whatever the length of an axis; float32 partials are a variant of their own."""
    forward = set()
    for size in SIZES:
        sizes = {"kept": other, "reduced": other, axis: size}
        made = planned(replace(PROBLEM, batch=batch, **sizes, needs_reduced_gradient=training))
        forward.add((made.forward_tiles.sm90, made.splits > 1))
    assert len(forward) <= 3


def test_indices_and_masks_take_fewer_consumers() -> None:
    plain, indexed = planned(PROBLEM), planned(replace(PROBLEM, needs_reduced_gradient=True))
    assert plain.forward_tiles.sm90 == sm90_reduce_config(1024, 1024, 128, 132)
    assert indexed.forward_tiles.sm90 == sm90_reduce_config(1024, 1024, 128, 132, costly=True)
    assert planned(replace(PROBLEM, masked=True)).forward_tiles == indexed.forward_tiles


@pytest.mark.parametrize(
    ("change", "sm90"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"K": 100}, False),
        ({"K": 256}, False),
        ({"activation": "relu"}, False),
        ({"product": True}, False),
    ],
)
def test_which_problems_are_sm90(change: dict[str, object], sm90: bool) -> None:
    made = planned(replace(PROBLEM, **change))  # type: ignore[arg-type]
    assert (made.forward_tiles.sm90 is not None) == sm90


def test_long_axes_are_split_where_tiles_are_few() -> None:
    assert planned(PROBLEM).splits == 1
    assert planned(replace(PROBLEM, batch=1)).splits == 2
    assert planned(replace(PROBLEM, batch=1, reduced=65_536)).splits == 33
    assert planned(replace(PROBLEM, batch=1, reduced=500)).splits == 1
    few = planned(replace(PROBLEM, batch=1, kept=128, reduced=65_536))
    assert few.splits > 32
    assert few.workspace_bytes == few.splits * 8 * 128 <= PARTIALS_LIMIT
    assert planned(replace(few.problem, product=True)).splits == 1


def test_the_gradient_of_maxima_takes_two_sizes_of_blocks() -> None:
    assert {one_hot_pipeline(size, 1024, 128, 132) for size in SIZES} == {
        one_hot_pipeline(32, 1024, 128, 132),
        one_hot_pipeline(64, 1024, 128, 132),
    }
    few, many = one_hot_pipeline(64, 64, 128, 132), one_hot_pipeline(64, 65, 128, 132)
    assert (few.consumers, many.consumers) == (1, 2)
    assert one_hot_pipeline(64, 64, 136, 132) is None


@pytest.mark.parametrize("op", ["max", "sum", "sumsq", "logsumexp"])
@pytest.mark.parametrize("change", [{"biased": True}, {"activation": "relu"}, {"product": True}], ids=str)
def test_what_no_benchmark_measures_is_left_to_torch(op: str, change: dict[str, object]) -> None:
    problem = replace(PROBLEM, op=op)
    other = plan(replace(problem, **change), where(H200, problem, {"fused": 0.5}))
    assert other.path != "fused"
    assert "nothing like it was measured" in dict(other.rejected)["fused"]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_have_a_choice_of_three(op: str) -> None:
    problem = replace(PROBLEM, op=op)
    for ratios, path in (
        ({"fused": 0.5, "algebraic": 0.4}, "algebraic"),
        ({"fused": 0.4, "algebraic": 0.5}, "fused"),
        ({"fused": 1.4, "algebraic": 1.5}, "torch"),
    ):
        made = plan(problem, where(H200, problem, ratios))
        assert made.path == path
        assert {made.path, *dict(made.rejected)} == {"fused", "algebraic", "torch"}
    # Where nothing was measured the product of a sum is less work.
    for device in (Device("cpu"), replace(H200, architecture="sm_80", name="NVIDIA A100")):
        assert plan(problem, device).path == "algebraic"
    assert plan(problem, where(H200, PROBLEM, {"fused": 0.5})).path == "algebraic"


@pytest.mark.parametrize(
    ("sizes", "tile", "splits"),
    [
        ((64, 34, 1920, 80), (64, 64, 128, 4), 4),  # two programs on each SM
        ((40, 20, 2048, 64), (32, 64, 64, 4), 6),
        ((100, 34, 1920, 80), (64, 128, 128, 8), 1),  # one on each
        ((200, 34, 1920, 80), (64, 64, 128, 4), 1),
        ((64, 96, 2048, 128), (128, 128, 128, 8), 2),
        ((256, 96, 2048, 64), (128, 128, 64, 8), 1),
    ],
    ids=str,
)
def test_few_kept_rows_have_both_gradients_at_once(
    sizes: tuple[int, int, int, int], tile: tuple[int, int, int, int], splits: int
) -> None:
    batch, kept, reduced, width = sizes
    problem = ReduceProblem(
        batch=batch, kept=kept, reduced=reduced, K=width, dtype="bfloat16", op="logsumexp", needs_kept_gradient=True,
        needs_reduced_gradient=True,
    )  # fmt: skip
    made = planned(problem)
    tiles = made.one_pass_tiles
    assert (tiles.block_p, tiles.block_r, tiles.block_k, tiles.num_warps) == tile
    assert made.one_pass_splits == splits
    assert planned(replace(problem, kept=129)).one_pass_tiles is None
    assert planned(replace(problem, needs_kept_gradient=False)).one_pass_tiles is None
