"""The chunked path's plans: within the limit, and dx carried where that saves a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fusedlayers import planning
from fusedlayers.planning import ChunkPass, plan
from fusedlayers.planning.ffn_chunk_costs import Layer, chunk_cost
from fusedlayers.planning.ffn_chunked import _cuts, _memory, _rows, _search
from tests.test_planning import DEVICES, H200, NO_TRITON, PIPELINED, TRAINING


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "size", [(16_384, 1024, 4096), (8192, 4096, 14_336), (131_072, 4096, 14_336), (64, 8192, 28_672)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_wide_layers_keep_the_limit(size: tuple[int, int, int], gated: bool, dtype: str) -> None:
    M, K, N = size
    problem = replace(TRAINING, M=M, K=K, N=N, O=K, dtype=dtype, gated=gated, recompute=True)
    for device in DEVICES:
        made = plan(problem, device)
        assert made.path == "chunked"
        assert 0 < made.workspace_bytes <= 64 * 2**20
        assert made.saved_bytes == problem.element_bytes * M * K
        (data,) = (step for step in made.chunks.passes if step.data)
        assert data.carried or -(-N // data.columns) <= planning.ffn_chunked.MOST_GROUPS[gated]
        assert made.epilogue is not None or not data.carried
        # The kernels of the epilogue path compute the chunks: the measured ones, or forced, all that there are.
        forced = plan(problem, device, "triton")
        assert (made.epilogue is not None) == (device.pipelined and dtype == "bfloat16")
        assert (forced.epilogue is not None) == device.triton
        assert forced.workspace_bytes <= 64 * 2**20


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_dx_is_carried_where_that_saves_a_pass(gated: bool) -> None:
    """Of as many tokens as its four bits for each element fit the limit; and only in the kernel that carries it."""
    problem = replace(TRAINING, M=8192, K=4096, N=14_336, O=4096, dtype="bfloat16", gated=gated, recompute=True)
    device = PIPELINED
    made = plan(problem, device)
    (step,) = made.chunks.passes
    assert step.carried
    assert step.rows == 8192
    assert made.backward_units == (8 if gated else 5), "the pre-activations are computed once more"
    assert made.epilogue.data_gradient_pipeline is not None
    assert plan(problem, H200, "triton").epilogue.data_gradient_pipeline is None
    # Of so many tokens that tiny groups alone fit beside the bits, and of more.
    assert [len(plan(replace(problem, M=M), device).chunks.passes) for M in (24_576, 131_072)] == [2, 2]
    for other in (
        plan(replace(problem, M=131_072), device),
        plan(replace(problem, dtype="float32"), device, "triton"),
        plan(problem, NO_TRITON),
        plan(replace(problem, needs_weight_gradient=False), device),
        plan(replace(problem, needs_data_gradient=False), device),
    ):
        assert not any(each.carried for each in other.chunks.passes)
        assert other.epilogue is None or other.epilogue.data_gradient_tiles is None


@pytest.mark.parametrize("size", [(4096, 32_768, 1024), (4096, 65_536, 1024), (8, 262_144, 512)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_chunks_of_the_widest_layers_keep_the_limit(size: tuple[int, int, int], gated: bool) -> None:
    """Of fewer hidden units than a tile has."""
    M, K, N = size
    problem = replace(TRAINING, M=M, K=K, N=N, O=K, gated=gated, recompute=True)
    for device in DEVICES:
        made = plan(problem, device)
        assert made.path == "chunked"
        assert 0 < made.workspace_bytes <= 64 * 2**20


@pytest.mark.parametrize("size", [(1024, 4096, 1024), (512, 1376, 384), (4096, 14_336, 4096), (64, 2**18, 64)], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_no_cut_costs_less_than_the_one_that_is_found(kernels: bool, gated: bool, size: tuple[int, int, int]) -> None:
    """The search leaves out cuts by bounds of their costs; here all of them are tried."""
    layer = Layer(*size, "bfloat16", 2, gated, False, 2**26, kernels, "cuda", 132, H200.figures.chunk_costs)
    for data, weights in ((True, True), (True, False), (False, True)):
        search = _search(layer, data, weights)
        for tokens in (2, 100, 1000, 8192, 16_384, 24_577, 50_000, 131_072, 10**6):
            costs = dict(_every_cost(layer, data, weights, tokens))
            best = min(costs.values(), default=math.inf)
            cost, found = search.cheapest(tokens)
            assert cost == pytest.approx(best, rel=1e-12)
            if found is None:
                assert not costs
                continue
            assert costs[found] == pytest.approx(best, rel=1e-12)
            assert search.memory.bytes(found, tokens) <= layer.workspace_limit
            assert search.cheapest(tokens, cost * 1.001) == (cost, found)
            assert search.cheapest(tokens, cost * 0.999) == (cost * 0.999, None)


def _every_cost(layer: Layer, data: bool, weights: bool, tokens: int) -> Iterator[tuple[ChunkPass, float]]:
    """Every pass that fits, and its cost."""
    memory = _memory(layer, weights)
    for cut in _cuts(layer, data, weights):
        step = ChunkPass(tokens, *cut)
        if cut.columns == layer.N or memory.bytes(step, tokens) > layer.workspace_limit:
            taken = cut.columns * (memory.unit + memory.sums) + memory.carried * tokens * cut.carried
            most = int((layer.workspace_limit - taken) / memory.token_bytes(cut.columns, cut.slice_columns))
            if most < 1:
                continue
            step = ChunkPass(_rows(tokens, most), *cut)
        chunks = math.ceil(tokens / step.rows) * math.ceil(layer.N / cut.columns)
        yield step, chunks * chunk_cost(layer, cut, step.rows == tokens).of(step.rows)
