"""Late interaction: the kernels against torch in the same dtype and in float64, and against exact integers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, reference
from tests.operands import DEVICE


def inputs(queries: Sequence[int], documents: Sequence[int], width: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Queries and documents of these lengths."""
    return {
        name: [torch.randn(length, width, dtype=torch.float64).to(DEVICE, dtype) for length in lengths]
        for name, lengths in (("queries", queries), ("documents", documents))
    }


def padded(tensors: Sequence[Tensor], value: float = math.nan, extra: int = 0) -> tuple[Tensor, Tensor]:
    """``[n, longest + extra, d]`` with ``value`` in place of missing tokens, and the mask."""
    longest = max(len(tensor) for tensor in tensors) + extra
    result = tensors[0].new_full((len(tensors), longest, tensors[0].shape[-1]), value)
    mask = torch.zeros(result.shape[:2], dtype=torch.bool, device=result.device)
    for place, tensor in enumerate(tensors):
        result[place, : len(tensor)] = tensor
        mask[place, : len(tensor)] = True
    return result, mask


def packed(tensors: Sequence[Tensor], dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """``[total, d]`` and the offsets."""
    ends = torch.tensor([0, *[len(tensor) for tensor in tensors]]).cumsum(0)
    return torch.cat(list(tensors)), ends.to(DEVICE, dtype)


def pair_by_pair(queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """The definition, one query and one document at a time."""
    return torch.stack([torch.stack([(q @ e.mT).amax(-1).sum() for e in documents]) for q in queries])


def test_the_reference_is_the_definition() -> None:
    """In every combination of padded and packed sides; the padding holds NaN."""
    sequences = inputs([3, 1, 4], [2, 5, 1, 3], 6, torch.float64)
    truth = pair_by_pair(**sequences)
    q, q_mask = padded(sequences["queries"])
    e, e_mask = padded(sequences["documents"])
    q_packed, q_ends = packed(sequences["queries"])
    e_packed, e_ends = packed(sequences["documents"], torch.int64)
    for scores in (
        reference.maxsim(q, e, q_mask, e_mask),
        reference.maxsim(q_packed, e, document_mask=e_mask, cu_seqlens_queries=q_ends),
        reference.maxsim(q, e_packed, q_mask, cu_seqlens_documents=e_ends),
        reference.maxsim(q_packed, e_packed, cu_seqlens_queries=q_ends, cu_seqlens_documents=e_ends),
    ):
        torch.testing.assert_close(scores, truth)


@pytest.mark.parametrize("lengths", [(0, 0), (2, 0), (0, 2), (3, 2)])
def test_sides_without_tokens_or_entries(lengths: tuple[int, int]) -> None:
    """An empty query scores 0, a query against an empty document -inf, and neither gets a gradient."""
    sequences = inputs([lengths[0]] * 2, [lengths[1]] * 3, 4, torch.float64)
    q, e = (torch.stack(sequences[name]).requires_grad_() for name in ("queries", "documents"))
    scores = functional.maxsim(q, e)
    assert scores.shape == (2, 3)
    if lengths[0] == 0:
        assert (scores == 0).all()
    elif lengths[1] == 0:
        assert (scores == -math.inf).all()
    if 0 in lengths:
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(scores.sum(), (q, e)))
    assert functional.maxsim(q[:0], e).shape == (0, 3)
    assert functional.maxsim(q, e[:0]).shape == (2, 0)
    for queries, documents in ((2, 0), (0, 3), (0, 0)):
        ends = [torch.zeros(n + 1, dtype=torch.int32, device=DEVICE) for n in (queries, documents)]
        empty = q.new_zeros(0, 4)
        found = functional.maxsim(empty, empty, cu_seqlens_queries=ends[0], cu_seqlens_documents=ends[1])
        assert found.shape == (queries, documents)


def test_derivatives_in_float64() -> None:
    q, e = (torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    q_mask = torch.tensor([[True] * 4, [True, False, True, False]])
    e_mask = torch.tensor([[False, True, True, False, True], [False] * 5])

    def call(queries: Tensor, documents: Tensor) -> Tensor:
        scores = functional.maxsim(queries, documents, q_mask, e_mask)
        return scores.masked_fill(scores.isinf(), 0)

    assert torch.autograd.gradcheck(call, (q, e))
    assert torch.autograd.gradgradcheck(call, (q, e))
    gradients = torch.autograd.grad(functional.maxsim(q, e, q_mask, e_mask)[:, 1].sum(), (q, e))
    assert all((gradient == 0).all() for gradient in gradients), "a document without tokens has no gradient"


def test_the_module_is_the_function() -> None:
    module = fl.MaxSim()
    q, e = torch.randn(2, 3, 4), torch.randn(5, 6, 4)
    masks: dict[str, Any] = {"query_mask": torch.rand(2, 3) < 0.7, "document_mask": torch.rand(5, 6) < 0.7}
    expected = functional.maxsim(q, e, **masks)
    assert not module.state_dict()
    assert not list(module.parameters())
    assert repr(module) == "MaxSim()"
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.half().to(DEVICE)):
        assert torch.equal(same(q, e, masks["query_mask"], masks["document_mask"]), expected)
    packs = {"cu_seqlens_queries": torch.tensor([0, 1, 6]), "cu_seqlens_documents": torch.tensor([0, 30])}
    flat = (q.flatten(0, 1), e.flatten(0, 1))
    assert torch.equal(module(*flat, **packs), functional.maxsim(*flat, **packs))
