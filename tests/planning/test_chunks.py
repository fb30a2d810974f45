"""The chunked path's plans: a few groups of hidden units, and temporary memory of eight times x."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies

from fusedlayers.planning import Device, ffn_chunked, plan
from fusedlayers.planning.ffn_chunked import CHUNK_RULE, LEAST_WORKSPACE
from tests.planning.test_paths import DEVICES, H200, NO_TRITON, SM90, TRAINING

GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


@GATED
@pytest.mark.parametrize(
    "size",
    [
        *((16_384, 1024, 4096), (8192, 4096, 14_336), (131_072, 4096, 14_336), (64, 8192, 28_672)),
        *((10_000, 1000, 3000), (4096, 32_768, 1024), (4096, 65_536, 1024), (8, 262_144, 512), (2**20, 8, 2**16)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_take_at_most_eight_times_x(size: tuple[int, int, int], gated: bool, dtype: str) -> None:
    M, K, N = size
    problem = replace(TRAINING, M=M, K=K, N=N, O=K, dtype=dtype, gated=gated, recompute=True, needs_bias_gradient=True)
    x = problem.element_bytes * M * K
    for device in DEVICES:
        for wish in ("auto", "triton"):
            made = plan(problem, device, wish)
            if made.path == "fused":
                continue
            assert made.path == "chunked"
            assert 0 < made.workspace_bytes <= max(8 * x, LEAST_WORKSPACE)
            assert made.saved_bytes == x
            assert made.chunks.rows <= min(M // 2, CHUNK_RULE.most_rows)
            assert made.chunks.hidden_columns <= made.chunks.columns < N
            assert made.chunks.columns <= max(N // 2 + 128, 2 * K)
            if made.chunks.hidden_in_dx:
                assert made.chunks.hidden_columns <= K
            # Kernels of the epilogue path compute the chunks: where they were measured or, forced, wherever they run.
            measured = device.record is not None and dtype == "bfloat16"
            assert (made.epilogue is not None) == (device.triton and (measured or wish == "triton"))


@GATED
@pytest.mark.parametrize("size", [(16_384, 1024, 4096), (8192, 2048, 8192), (8192, 4096, 14_336), (65_536, 768, 3072)])
def test_layers_of_usual_widths_have_two_groups(size: tuple[int, int, int], gated: bool) -> None:
    """In the kernels: the sum of dx takes twice x, and at most six times x are left for a group and its hidden."""
    M, K, N = size
    problem = replace(TRAINING, M=M, K=K, N=N, O=K, dtype="bfloat16", gated=gated, recompute=True)
    made = plan(problem, SM90)
    assert (made.chunks.columns, made.chunks.hidden_columns, made.chunks.hidden_in_dx) == (N // 2, N // 2, False)
    assert made.workspace_bytes == 2 * M * (2 * K + N // 2 * (3 if gated else 2)) <= 8 * 2 * M * K
    assert made.backward_units == (8 if gated else 5), "the pre-activations are computed once more"
    # Partial sums of biases lie in the gradient of w_up, unless it is too small, which both together may find it.
    biased = plan(replace(problem, needs_bias_gradient=True), SM90)
    assert biased.chunks.columns == made.chunks.columns
    assert biased.workspace_bytes <= 8 * 2 * M * K
    assert biased.chunks.hidden_in_dx == (gated and M > 16 * K)


@hypothesis.given(
    device=strategies.sampled_from([SM90, H200, NO_TRITON]),
    size=strategies.tuples(*[strategies.integers(2, most) for most in (200_000, 9000, 30_000)]),
    facts=strategies.fixed_dictionaries(
        {"dtype": strategies.sampled_from(["bfloat16", "float32"])}
        | {name: strategies.booleans() for name in ("gated", "dropout", "needs_bias_gradient", "needs_data_gradient")}
    ),
    kernels=strategies.booleans(),
)
def test_any_size_keeps_to_the_limit(
    device: Device, size: tuple[int, int, int], facts: dict[str, str | bool], kernels: bool
) -> None:
    """Down to chunks of one token and groups of one hidden unit, below which there is nothing to cut."""
    M, K, N = size
    problem = replace(TRAINING, M=M, K=K, N=N, O=K, recompute=True, **facts)
    made = ffn_chunked.plan(problem, device, kernels and device.triton)
    assert 0 < made.hidden_columns <= made.columns < N
    assert not made.hidden_in_dx or made.hidden_columns <= K
    least = 1 in (made.rows, made.columns, made.group_rows)
    assert least or made.workspace_bytes <= ffn_chunked.workspace_limit(problem)


def test_the_hidden_lies_in_dx_where_that_is_free() -> None:
    problem = replace(TRAINING, M=16_384, K=2048, N=16_384, O=2048, dtype="bfloat16", recompute=True)
    made = plan(problem, SM90).chunks
    assert (made.columns, made.hidden_columns, made.hidden_in_dx) == (8192, 2048, True)
    for other in (
        replace(problem, dtype="float32"),  # dx is its own sum
        replace(problem, needs_data_gradient=False),
        replace(problem, needs_weight_gradient=False),  # there is no hidden
        replace(problem, M=512),  # 256 MiB are more than eight times x
    ):
        assert not plan(other, SM90, "triton").chunks.hidden_in_dx, other


@GATED
def test_a_kernel_sums_dx_where_it_runs(gated: bool) -> None:
    problem = replace(TRAINING, M=8192, K=4096, N=14_336, O=4096, dtype="bfloat16", gated=gated, recompute=True)
    assert plan(problem, SM90).epilogue.data_gradient_pipeline is not None
    for other in (
        plan(problem, H200, "triton"),
        plan(replace(problem, dtype="float32"), SM90, "triton"),
        plan(replace(problem, needs_data_gradient=False), SM90),
    ):
        assert other.epilogue.data_gradient_pipeline is None
    assert plan(problem, NO_TRITON).epilogue is None
