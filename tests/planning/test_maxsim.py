"""Which path maxsim takes, with which chunks and splits, as numbers; and what ``explain`` says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import explaining, functional, planning
from fusedlayers.functional import dispatch
from fusedlayers.planning import Device, MaxSimPlan, MaxSimProblem
from tests.support.records import CPU, H200

MANY = MaxSimProblem(
    queries=128, documents=128, query_tokens=128 * 32, document_tokens=128 * 300, K=128, dtype="bfloat16"
)
TRAINED = replace(MANY, needs_query_gradient=True, needs_document_gradient=True)


def forced(problem: MaxSimProblem, device: Device = H200) -> MaxSimPlan:
    plan: MaxSimPlan = planning.plan(problem, device, "triton")
    assert plan.path == "fused"
    return plan


def test_maxima_and_partials_stay_within_their_limit() -> None:
    limit = planning.devices.PARTIALS_LIMIT
    for problem in (
        TRAINED,
        replace(TRAINED, queries=1, query_tokens=32, documents=10_000, document_tokens=3_000_000),
        replace(TRAINED, queries=4096, query_tokens=4096 * 32, documents=4096, document_tokens=4096 * 300),
        replace(TRAINED, queries=3, query_tokens=96, documents=1, document_tokens=200_000),
    ):
        plan = forced(problem)
        p = plan.problem
        assert 1 <= plan.chunk <= p.documents
        assert 4 * plan.chunk * p.query_tokens <= limit
        for splits, elements in (
            (plan.query_gradient_splits, p.query_tokens * p.K),
            (plan.document_gradient_splits, p.document_tokens * p.K),
        ):
            assert splits == 1 or 4 * splits * elements <= limit
    assert forced(replace(TRAINED, queries=4096, query_tokens=4096 * 32, documents=4096)).chunk == 256


def test_splits_fill_the_device_and_no_more() -> None:
    lone = replace(TRAINED, queries=1, query_tokens=32, documents=2, document_tokens=20_000)
    plan = forced(lone)
    assert plan.splits > 1, "two documents fill two SMs"
    assert plan.document_gradient_splits == 1, "one block of query tokens has nothing to split"
    assert forced(replace(lone, documents=10_000, document_tokens=3_000_000)).splits == 1
    assert forced(replace(lone, documents=10_000, document_tokens=3_000_000)).query_gradient_splits > 8
    assert (
        forced(
            replace(lone, queries=4096, query_tokens=131_072, documents=1, document_tokens=64)
        ).document_gradient_splits
        > 8
    )


def test_only_wanted_gradients_are_planned_and_counted() -> None:
    inference, queries = forced(MANY), forced(replace(MANY, needs_query_gradient=True))
    assert (
        inference.query_gradient_tiles is inference.document_gradient_tiles is queries.document_gradient_tiles is None
    )
    assert inference.saved_bytes == 0
    product, gathered = 2 * 4096 * 38_400 * 128, 2 * 4096 * 128 * 128
    assert inference.flops == product
    assert queries.flops == product + gathered
    assert forced(TRAINED).flops == 2 * product + gathered
    assert planning.plan(TRAINED, H200, "torch").flops == 3 * product
    assert forced(TRAINED).saved_bytes == 2 * (4096 + 38_400) * 128 + 4 * 4096 * 128


def explained(
    target: object, device: Device, monkeypatch: pytest.MonkeyPatch, *inputs: torch.Tensor, **options: Any
) -> str:
    for module in (dispatch, explaining):
        monkeypatch.setattr(module, "describe", lambda where: device)
    return fl.explain(target, *inputs, **options, details=True)  # type: ignore[arg-type]


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    q, e = (
        torch.empty(*shape, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in ((32, 128), (128, 300))
    )
    mask = torch.empty(128, 300, dtype=torch.bool, device="meta")
    text = explained(fl.MaxSim(), H200, monkeypatch, q.transpose(0, 1), e, document_mask=mask)
    assert text == explained(functional.maxsim, H200, monkeypatch, q.transpose(0, 1), e, document_mask=mask)
    for line in (
        "maxsim: scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]",
        "Q=128 (4096 tokens, padded) D=128 (38400 tokens, masked) d=128, bfloat16, forward and backward",
        "fused: the kernels keep no similarities",
        "1 ranges of a document's tokens, 128 documents at a time",
        "has no uniform rows: one contiguous copy",
        "the fused path comes first",
    ):
        assert line in text, text
    ends = torch.empty(11, dtype=torch.int32, device="meta")
    packed = torch.empty(900, 128, dtype=torch.bfloat16, device="meta")
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    text = explained(functional.maxsim, CPU, monkeypatch, q.detach(), packed, cu_seqlens_documents=ends)
    assert "D=10 (900 tokens, packed)" in text
    assert "torch: no other path is both possible and faster" in text
    assert "0 (no gradient is wanted)" in text
