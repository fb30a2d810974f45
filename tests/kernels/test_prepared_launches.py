"""Launches that are prepared once are told what unprepared ones are; their numbers are in the autograd contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import planning
from fusedlayers.kernels import gemm_epilogue, gemm_gemm, gemm_reduce, hopper, launching, maxsim
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.device import HAS_TRITON
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from fusedlayers.kernels.maxsim import MaxSimOperands
from fusedlayers.kernels.split_k import product
from fusedlayers.kernels.tuning import COLUMN_SUM_TILES, EpilogueTiles, ReduceConfig, SplitTiles, TileConfig
from fusedlayers.kernels.tuning.grouped_gemm import GroupedTiles
from fusedlayers.kernels.weight_gradient import weight_gradient
from tests.support.operands import needs_kernels
from tests.support.prepared_launches import HOPPER, Watched, assert_told_the_same, drawn
from tests.support.stand_in_launchers import Launcher, stand_in_driver

GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def planned(width: int, gated: bool) -> planning.Plan:
    problem = planning.Problem(
        operation="ffn", batch=1, M=200, K=width, N=2 * width, O=width, dtype="bfloat16", activation="silu",
        gated=gated, dropout=False, needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip
    found: planning.Plan = planning.plan(problem, HOPPER, "triton")
    return found


def both_passes(width: int, gated: bool) -> Callable[[dict[Any, Any] | None], None]:
    """The kernels of a forward and a backward pass of a layer, as the plan for a Hopper GPU names them."""
    plan, hidden = planned(width, gated), 2 * width
    x, dy, up, down, gate = (
        drawn(*shape, dtype=torch.bfloat16)
        for shape in ((200, width), (200, width), (hidden, width), (width, hidden), (hidden, width))
    )
    bias, gate_bias = drawn(hidden, dtype=torch.bfloat16), drawn(hidden, dtype=torch.bfloat16)
    gates = (gate, gate_bias) if gated else (None, None)
    arithmetic = Arithmetic("silu", 0.0, "ieee", "coarse")

    def narrow(ready: dict[Any, Any] | None) -> None:
        operands = Operands(x, up, down, bias, *gates, None, arithmetic, ready)
        gemm_gemm.forward(operands, dy[0], x, plan.forward_tiles)
        if plan.stored is not None:
            found = gemm_gemm.stored_gradients(operands, dy, True, gated, True, plan.stored_splits, plan.stored)
            assert found is not None
            return
        gemm_gemm.data_gradient(operands, dy, plan.data_gradient_tiles, column_sums=True)
        wanted = WeightGradients(True, gated, True, True, gated)
        gemm_gemm.weight_gradients(operands, dy, wanted, 3, plan.weight_gradient_tiles)

    def wide(ready: dict[Any, Any] | None) -> None:
        tiles = plan.epilogue
        _, z, z_gate = gemm_epilogue.hidden(
            x, up, bias, *gates, True, arithmetic, tiles.hidden_tiles, tiles.hidden_pipeline, ready=ready
        )
        gradient = tiles.gradient
        assert z is not None
        assert gradient.tiles is not None
        gemm_epilogue.hidden_gradient(
            dy, down, z, z_gate, True, gradient.row_tiles, arithmetic, gradient.tiles, gradient.pipeline,
            keep_hidden=True, for_products=True, column_sums=COLUMN_SUM_TILES, ready=ready,
        )  # fmt: skip

    return narrow if plan.path == "fused" else wide


M, K, N = 40, 16, 24
X, UP, DOWN, BIAS = drawn(M, K), drawn(N, K), drawn(K, N), drawn(N)
SILU = Arithmetic("silu", 0.0, "ieee", "exact")
Ready = dict[Any, Any] | None


def narrow_gradients(dy: Tensor, every: bool, ready: Ready) -> tuple[Any, ...]:
    operands, tiles = Operands(X, UP, DOWN, BIAS, None, None, None, SILU, ready), TileConfig(16, 16, 4, 1, 1)
    wanted = WeightGradients(True, False, True, True, False) if every else WeightGradients(down=True)
    of_weights = gemm_gemm.weight_gradients(operands, dy, wanted, 3, tiles)
    return *gemm_gemm.data_gradient(operands, dy, tiles, column_sums=every), *of_weights


def wide_gradients(dy: Tensor, every: bool, ready: Ready) -> tuple[Any, ...]:
    tiles = EpilogueTiles(16, 16, 16, 4, 1)
    kept, z, _ = gemm_epilogue.hidden(X, UP, BIAS, None, None, every, SILU, tiles, ready=ready)
    return kept, *gemm_epilogue.hidden_gradient(
        dy, DOWN, X @ UP.T if z is None else z, None, every, 2, SILU, tiles, keep_hidden=every, for_products=True,
        column_sums=COLUMN_SUM_TILES if every else None, ready=ready,
    )  # fmt: skip


def reduction_gradients(dy: Tensor, every: bool, ready: Ready) -> tuple[Any, ...]:
    tiles, found = ReduceConfig(16, 16, 16, 4, 1), []
    for op in ("max", "sumsq"):
        arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
        # Each operation is a call of its own.
        given = None if ready is None else ready.setdefault(op, {})
        operands = ReduceOperands(dy.contiguous()[None], UP[None], None, BIAS, None, None, None, arithmetic, given)
        result, index = gemm_reduce.reduce(
            operands, indices=op == "max", out_dtype=torch.float32, splits=1, tiles=tiles
        )
        if op == "max":
            found += gemm_reduce.route(operands, result, index, kept_gradient=every)
        else:
            for gradient in (gemm_reduce.kept_gradient, gemm_reduce.reduced_gradient):
                found += gradient(operands, result, result, matrix=every, bias=True, tiles=tiles)
    return tuple(found)


RUNS: dict[str, Callable[[Tensor, bool, Ready], Any]] = {
    "narrow FFN": narrow_gradients,
    "wide FFN": wide_gradients,
    "reduction": reduction_gradients,
    "linear": lambda dy, every, ready: weight_gradient(
        dy, X, every, 3, "ieee", GroupedTiles(16, 16, 16, 4, 1), ready=ready
    ),
    "sums": lambda dy, every, ready: [column_sums(dy, COLUMN_SUM_TILES, ready)],
    "split product": lambda dy, every, ready: [product(dy, UP, BIAS, 3, SplitTiles(16, 16, 16, 4, 1), ready=ready)],
}


@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_one_call_may_be_asked_for_other_gradients_of_another_layout(run: str) -> None:
    ready: dict[Any, Any] = {}
    for dy, every in ((drawn(M, K), True), (drawn(K, M).T, True), (drawn(M, K), False), (drawn(M, K), True)):
        for one, other in zip(RUNS[run](dy, every, ready), RUNS[run](dy, every, None), strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
@pytest.mark.parametrize("nested", [False, True], ids=["one by one", "in a tuple"])
@GATED
@pytest.mark.parametrize("width", [64, 128, 256, 768])
def test_sm90_kernels_are_told_the_same(width: int, gated: bool, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_told_the_same(both_passes(width, gated), nested, monkeypatch)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_encodings_are_bounded_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ENCODINGS_LIMIT", 4)
    watched = Watched(Launcher, monkeypatch)
    whole = drawn(64, 64, dtype=torch.bfloat16)
    found = hopper.matrix(whole)
    with stand_in_driver() as encoded:
        launch = launching.Launch(None, 3, (5,), (), (), geometries=(found.geometry(8, 64), None))
        [encodings, _] = launch._descriptors
        for row in range(10):
            for _ in range(2):
                launch((whole[row:], None, drawn(4)))
            assert len(encodings) <= 4
    # Every second launch is at the same address.
    assert len(encoded) == 10
    assert watched.compiled == 1
    assert not any(isinstance(each, Tensor) for encoding in encodings.values() for each in encoding)


def late_interaction(ready: dict[Any, Any] | None, tensors: tuple[Tensor, ...]) -> None:
    queries, documents, upstream, _ = tensors
    problem = planning.MaxSimProblem(
        queries=4, documents=50, query_tokens=4 * 32, document_tokens=50 * 200, K=128,
        query_layout="padded", document_layout="padded", dtype="bfloat16", needs_query_gradient=True,
        needs_document_gradient=True,
    )  # fmt: skip
    plan = planning.plan(problem, HOPPER, "triton")
    assert plan.forward_tiles.sm90 is not None
    operands = MaxSimOperands(queries, documents, 32, None, None, None, None, "ieee", ready)
    _, chosen = maxsim.forward(operands, indices=True, splits=plan.splits, chunk=plan.chunk, tiles=plan.forward_tiles)
    assert chosen is not None
    maxsim.query_gradient(operands, chosen, upstream, plan.query_gradient_splits, plan.query_gradient_tiles)
    maxsim.document_gradient(
        operands, chosen, upstream, plan.document_gradient_splits, plan.chunk, plan.document_gradient_tiles
    )


def logsumexp(ready: dict[Any, Any] | None, tensors: tuple[Tensor, ...]) -> None:
    queries, documents, *_, upstream = tensors
    kept = queries[:100].expand(50, -1, -1)
    problem = planning.ReduceProblem(
        batch=50, kept=100, reduced=200, K=128, op="logsumexp", dtype="bfloat16",
        needs_kept_gradient=True, needs_reduced_gradient=True,
    )  # fmt: skip
    plan = planning.plan(problem, HOPPER, "triton")
    assert plan.forward_tiles.sm90 is not None
    arithmetic = ReduceArithmetic("logsumexp", "identity", "ieee", plan.accuracy)
    operands = ReduceOperands(kept, documents, None, None, None, None, None, arithmetic, ready)
    result, _ = gemm_reduce.reduce(operands, indices=False, out_dtype=torch.float32, splits=2, tiles=plan.forward_tiles)
    wanted: Any = {"matrix": True, "bias": False, "tiles": plan.gradient_tiles}
    gemm_reduce.kept_gradient(operands, upstream, result, **wanted)
    gemm_reduce.reduced_gradient(operands, upstream, result, **wanted)


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
@pytest.mark.parametrize("run", [late_interaction, logsumexp])
def test_sm90_reductions_are_told_the_same(
    run: Callable[[dict[Any, Any] | None, tuple[Tensor, ...]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((128, 128), (50, 200, 128), (4, 50))
    tensors = (*[drawn(*shape, dtype=torch.bfloat16) for shape in shapes], drawn(50, 100))
    assert_told_the_same(lambda ready: run(ready, tensors), False, monkeypatch)
