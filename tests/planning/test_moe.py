"""How experts are planned: blocks of rows, tiles, bytes, and why a path is taken, all in integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from fusedlayers.kernels.tuning.grouped_gemm import BLOCKS, GROUPED_TILES, padded_rows, row_block
from fusedlayers.kernels.tuning.grouped_gemm_pipelines import BLOCK, GROUPED_PIPELINES
from fusedlayers.planning import plan
from fusedlayers.planning.moe_ffn import MOST_ROWS, MoeProblem
from tests.support.records import H200

MIB = 2**20
STEPS = ("hidden", "product", "hidden_gradient", "weight_gradient")


def problem(M: int, K: int, N: int, E: int, k: int, dtype: str = "bfloat16", **facts: Any) -> MoeProblem:
    return MoeProblem(M, K, N, E, k, dtype, **{"gated": True, "training": True, **facts})


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((16384, 2048, 768, 128, 8), 600), ((8192, 4096, 14336, 8, 2), 1100), ((16384, 1024, 512, 64, 6), 450)],
)
def test_what_published_sizes_keep(sizes: tuple[int, ...], most: int) -> None:
    """The input, the routing, and each pre-activation once, with the most padding that any routing makes."""
    made = plan(problem(*sizes), H200, "triton")
    M, K, N, E, k = sizes
    assert made.path == "epilogue"
    assert made.saved_bytes < most * MIB
    rows = (M * k + E * 127) // 128 * 128
    assert made.saved_bytes >= 2 * (M * K + 2 * rows * N)
    again = plan(problem(*sizes, recompute=True), H200, "triton")
    assert again.saved_bytes < 2 * M * K + 3 * MIB
    assert again.flops > made.flops


def test_blocks_hold_an_experts_share_of_the_rows() -> None:
    assert row_block(10_000, 4, training=True) == row_block(1, 512, training=True) == BLOCKS[-1] == BLOCK
    assert row_block(512, 128, training=False) == 16
    assert row_block(16 * 128, 128, training=False) == 16
    assert row_block(16 * 128 + 1, 128, training=False) == 64
    assert row_block(64 * 128 + 1, 128, training=False) == 128
    assert row_block(10**6, 8, training=False) == 128


def test_padding_is_for_any_routing() -> None:
    for block in BLOCKS:
        for rows, experts in ((1, 1), (5, 3), (129, 7)):
            # One row each as far as they reach, and all others to the first.
            alone = min(rows, experts) - 1
            used = alone * block + -(-(rows - alone) // block) * block
            assert used <= padded_rows(rows, experts, block)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tokens", [64, 16384])
def test_which_kernels_run(dtype: str, training: bool, tokens: int) -> None:
    made = plan(problem(tokens, 2048, 768, 128, 8, dtype, training=training), H200, "triton")
    steps = STEPS if training else STEPS[:2]
    assert [step for step in STEPS if getattr(made, f"{step}_tiles") is not None] == list(steps)
    sm90 = dtype != "float32" and (training or tokens > 64)
    found = [step for step in STEPS if getattr(made, f"{step}_pipeline") is not None]
    assert found == (list(steps) if sm90 else [])
    for step in STEPS[:3]:
        tiles = getattr(made, f"{step}_tiles")
        assert tiles is None or made.problem.block % tiles.block_m == 0
    few = plan(made.problem, replace(H200, backend="generic", sms=4), "triton")
    assert few.hidden_pipeline is None
    text = dict(made.facts(H200))
    assert ("sm90" in text["hidden"]) == sm90
    assert f"padded to a multiple of {made.problem.block}" in text["rows"]


def test_every_row_of_the_table_divides_the_block_of_a_backward_pass() -> None:
    for tiles in GROUPED_TILES.values():
        assert BLOCKS[-1] % tiles.block_m == 0


def test_both_pre_activations_of_a_quarter_have_a_place() -> None:
    """With one place the gate's would wait for the other's to be given back, which waits for the gate's."""
    for pipelines in (EPILOGUE_PIPELINES, GROUPED_PIPELINES):
        for gated in (False, True):
            assert pipelines["hidden_gradient", gated].z_stages >= 1 + gated


def test_rows_have_32_bit_numbers() -> None:
    many = plan(problem(2**30, 32, 32, 4, 2), H200, "triton")
    assert many.unsupported == f"{many.problem.capacity:,} rows are more than have a 32-bit number"
    assert many.problem.capacity > MOST_ROWS


def test_torch_keeps_more() -> None:
    torch = plan(problem(16_384, 32, 32, 4, 2), H200, "torch")
    assert torch.saved_bytes > plan(torch.problem, H200, "triton").saved_bytes


def test_flops_are_those_of_the_model() -> None:
    p = problem(100, 32, 48, 4, 3)
    assert p.model_flops == (2 * 300 * 32 * 48 * 3, 4 * 300 * 32 * 48 * 3)
    assert replace(p, gated=False, training=False).model_flops == (2 * 300 * 32 * 48 * 2, 0)
