"""Launches of GEMM-reduce and of late interaction that are prepared once give what unprepared ones give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import planning
from fusedlayers.kernels import gemm_reduce, hopper, maxsim
from fusedlayers.kernels.gemm_reduce import ReduceArithmetic, ReduceOperands
from fusedlayers.kernels.maxsim import MaxSimOperands
from fusedlayers.kernels.tuning import GatherConfig, OneHotConfig, ReduceConfig
from tests.support.operands import needs_kernels
from tests.support.prepared_launches import HOPPER, assert_same, assert_told_the_same, drawn

K = 16


@pytest.mark.sampled(together=2)
@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize("op", ["mean", "max", "logsumexp", "sumsq"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "both at once"])
def test_reductions(op: str, splits: int, together: bool) -> None:
    """Forward and backward: with a mask and biases or without, and whatever is wanted in one execution."""
    tiles = ReduceConfig(16, 16, 16, 4, 1)
    for biased in (False, True):
        ready: dict[Any, Any] = {}
        for turn in range(4):
            kept, reduced = drawn(2, 10, K), drawn(2, 50, K) if turn != 1 else drawn(2, K, 50).mT
            biases = (drawn(10), drawn(50), torch.rand(2, 50) > 0.3) if biased else (None, None, None)
            arithmetic = ReduceArithmetic(op, "identity", "ieee", "exact")
            g = drawn(2, 10)
            found = []
            # Another layout belongs to another prepared call.
            for given in (ready if turn != 1 else {}, None):
                operands = ReduceOperands(kept, reduced, *biases, None, None, arithmetic, given)
                results = gemm_reduce.reduce(
                    operands, indices=op == "max", out_dtype=torch.float32, splits=splits, tiles=tiles
                )
                if op == "max":
                    assert results[1] is not None
                    weight, d_kept = gemm_reduce.route(operands, g, results[1], kept_gradient=turn != 2)
                    gradients = gemm_reduce.reduced_gradient(
                        operands, weight, results[1], matrix=True, bias=biased and turn != 3, tiles=tiles
                    )
                    found.append((results, weight, d_kept, gradients))
                elif together:
                    both = gemm_reduce.both_gradients(operands, g, results[0], tiles=tiles, splits=splits)
                    found.append((results, both))
                else:
                    wanted: Any = {"bias": biased and turn != 3, "tiles": tiles}
                    d_kept = gemm_reduce.kept_gradient(operands, g, results[0], matrix=turn != 2, **wanted)
                    d_reduced = gemm_reduce.reduced_gradient(operands, g, results[0], matrix=True, **wanted)
                    found.append((results, d_kept, d_reduced))
            assert_same(*found)
        assert not any(isinstance(each, Tensor) for each in ready.values())


@pytest.mark.sampled(together=2)
@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("chunk", [5, 2], ids=["at once", "in chunks"])
@pytest.mark.parametrize("layout", ["padded", "masked", "packed"])
def test_late_interaction(layout: str, chunk: int, splits: int) -> None:
    ready: dict[Any, Any] = {}
    tiles, gathered, one_hot = (
        ReduceConfig(16, 16, 16, 4, 1),
        GatherConfig(16, 16, 2, 4),
        OneHotConfig(16, 16, 16, 4, 1),
    )
    for _ in range(3):
        queries, upstream = drawn(4 * 6, K), drawn(4, 5)
        documents = drawn(60, K) if layout == "packed" else drawn(5, 12, K)
        masks = (torch.rand(24) > 0.3, torch.rand(5, 12) > 0.3) if layout == "masked" else (None, None)
        offsets = (
            (torch.tensor([0, 5, 6, 20, 24]), torch.tensor([0, 13, 14, 40, 41, 60]))
            if layout == "packed"
            else (None, None)
        )
        found = []
        for given in (ready, None):
            operands = MaxSimOperands(
                queries, documents, 1 if layout == "packed" else 6, *masks, *offsets, "ieee", given
            )
            scores, chosen = maxsim.forward(operands, indices=True, splits=splits, chunk=chunk, tiles=tiles)
            assert chosen is not None
            d_queries = maxsim.query_gradient(operands, chosen, upstream, splits, gathered)
            d_documents = maxsim.document_gradient(operands, chosen, upstream, splits, chunk, one_hot)
            found.append((scores, chosen, d_queries, d_documents))
        assert_same(*found)
    assert not any(isinstance(each, Tensor) for each in ready.values())


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
