"""Late interaction: the kernels against torch in the same dtype and in float64, and against exact integers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, reference
from fusedlayers.kernels import maxsim as kernels
from tests.support.maxsim_operands import (
    LAYOUTS,
    RAGGED,
    WAYS,
    assert_close_to_torch,
    double,
    laid_out,
    planned,
    results,
    sequences,
    upstream_for,
)
from tests.support.operands import (
    DEVICE,
    DTYPES,
    INTEGERS,
    assert_equal,
    in_float64,
    needs_kernels,
    on_path,
)


def pair_by_pair(queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """The definition, one query and one document at a time."""
    return torch.stack([torch.stack([(q @ e.mT).amax(-1).sum() for e in documents]) for q in queries])


def test_the_reference_is_the_definition() -> None:
    """In every combination of padded and packed sides; the padding holds NaN."""
    ragged = sequences([3, 1, 4], [2, 5, 1, 3], 6, torch.float64)
    truth = pair_by_pair(**ragged)
    for layouts in LAYOUTS:
        torch.testing.assert_close(reference.maxsim(**laid_out(ragged, *layouts)), truth)


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_exact_integers_in_every_layout(dtype: torch.dtype, path: str) -> None:
    """Ragged lengths, ties on the way, padding of NaN; all layouts give the same integers."""
    draw = INTEGERS[dtype]
    ragged = sequences(*RAGGED, 5, dtype, draw)
    upstream = draw(len(RAGGED[0]), len(RAGGED[1]), dtype=torch.float64).to(DEVICE, dtype)
    found = []
    for layouts in LAYOUTS:
        arguments = laid_out(ragged, *layouts)
        with on_path(path):
            ours = results(functional.maxsim, arguments, upstream)
        truth = results(reference.maxsim, double(arguments), upstream.double())
        assert_equal(in_float64(ours), truth)
        found.append(ours["scores"])
    assert all(torch.equal(scores, found[0]) for scores in found)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 33, 64, 128])
def test_widths(width: int, dtype: torch.dtype) -> None:
    q, e = (torch.randn(*shape, width).to(DEVICE, dtype) for shape in ((3, 11), (4, 19)))
    assert_close_to_torch({"queries": q, "documents": e})


@needs_kernels
def test_a_width_of_several_blocks() -> None:
    q, e = (torch.randn(*shape, 200, device=DEVICE) for shape in ((3, 9), (4, 17)))
    assert_close_to_torch({"queries": q, "documents": e})


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize(("queries", "documents"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths(queries: str, documents: str, dtype: torch.dtype) -> None:
    arguments = laid_out(sequences(RAGGED[0], [n + (n == 0) for n in RAGGED[1]], 24, dtype), queries, documents)
    assert_close_to_torch(arguments)


@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("splits", "layout"), [(1, 0), (2, 3), (3, 0), (3, 3), (5, 0), (8, 3)])
def test_any_number_of_splits_and_chunks(splits: int, layout: int) -> None:
    """More splits than there is work for are empty ones; chunks of two documents, the last of one."""
    queries, documents = LAYOUTS[layout]
    draw = INTEGERS[torch.float32]
    arguments = laid_out(sequences([33, 0, 38], [70, 0, 1, 33, 129], 5, draw=draw), queries, documents)
    upstream = draw(3, 5, dtype=torch.float64).to(DEVICE, torch.float32)
    truth = results(reference.maxsim, double(arguments), upstream.double())
    changes = {"splits": splits, "query_gradient_splits": splits, "document_gradient_splits": splits, "chunk": 2}
    with planned(**changes):
        ours = results(functional.maxsim, arguments, upstream)
    assert_equal(in_float64(ours), truth)


@pytest.mark.parametrize("path", WAYS)
def test_the_first_of_equal_similarities_gets_the_gradient(path: str) -> None:
    token = torch.tensor([1.0, 2.0], device=DEVICE)
    documents = torch.stack([token * 0, token, token, token * 0, token]).repeat(1, 40, 1)[:, :190]
    queries = token.expand(1, 3, 2)
    with on_path(path):
        found = results(functional.maxsim, {"queries": queries, "documents": documents})
    expected = torch.zeros_like(documents)
    expected[0, 1] = 3 * token
    assert torch.equal(found["ddocuments"], expected)


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("lengths", [(0, 0), (2, 0), (0, 2), (3, 2)])
def test_sides_without_tokens_or_entries(lengths: tuple[int, int], path: str) -> None:
    """An empty query scores 0, a query against an empty document -inf, and neither gets a gradient."""
    q, e = (
        torch.randn(n, length, 4, device=DEVICE, requires_grad=True) for n, length in zip((2, 3), lengths, strict=True)
    )
    with on_path(path):
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


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_empty_documents_between_others(layout: str, path: str) -> None:
    arguments = laid_out(sequences([3, 2], [0, 4, 0, 0, 2, 0], 6), "padded", layout)
    with on_path(path):
        found = results(functional.maxsim, arguments)
    scores, dq, de = found.values()
    empty = [0, 2, 3, 5]
    assert (scores[:, empty] == -math.inf).all()
    assert scores[:, [1, 4]].isfinite().all()
    assert dq.isfinite().all()
    assert de.isfinite().all()
    if layout == "padded":
        assert (de[empty] == 0).all()


@pytest.mark.parametrize("path", WAYS)
def test_packed_rows_and_offsets_of_any_stride(path: str) -> None:
    draw = INTEGERS[torch.float32]
    arguments = laid_out(sequences([3, 0, 5], [7, 2, 0, 4], 5, draw=draw), "packed", "packed")
    strided = {
        name: t.mT.contiguous().mT if t.dim() == 2 else t.repeat_interleave(2)[::2] for name, t in arguments.items()
    }
    with on_path(path):
        assert_equal(results(functional.maxsim, strided), results(functional.maxsim, arguments))


@pytest.mark.parametrize("path", WAYS)
def test_every_subset_of_frozen_operands(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right gradients, None elsewhere, no kernel for a gradient that nobody wants, and nothing saved for none."""
    launched: list[str] = []

    def count(name: str, real: Callable[..., Tensor]) -> None:
        def counted(*args: Any) -> Tensor:
            launched.append(name)
            return real(*args)

        monkeypatch.setattr(kernels, name, counted)

    count("query_gradient", kernels.query_gradient)
    count("document_gradient", kernels.document_gradient)
    arguments = laid_out(sequences([3, 2], [4, 1, 5], 6), "padded", "packed")
    upstream = upstream_for(arguments)
    with on_path(path):
        everything = results(functional.maxsim, arguments, upstream)
        for frozen, expected in (
            ((), ["query_gradient", "document_gradient"]),
            (("documents",), ["query_gradient"]),
            (("queries",), ["document_gradient"]),
        ):
            launched.clear()
            ours = results(functional.maxsim, arguments, upstream, frozen)
            assert_equal(ours, everything | {f"d{name}": None for name in frozen})
            assert launched == (expected if path == "kernels" else [])


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("width", [1, 2])
def test_autocast_at_widths_where_torchs_own_product_is_none(width: int, path: str) -> None:
    queries = torch.randn(2, 3, width, device=DEVICE, requires_grad=True)
    documents = torch.randn(4, 5, width, device=DEVICE)
    lengths = torch.tensor([0, 8, 20], device=DEVICE)
    with on_path(path), torch.autocast(DEVICE.type, torch.float16):
        scores = functional.maxsim(queries, documents)
        packed = functional.maxsim(queries, documents.flatten(0, 1), cu_seqlens_documents=lengths)
    assert scores.dtype == packed.dtype == torch.float16
    [gradient] = torch.autograd.grad(scores.sum(), queries)
    assert gradient.dtype == torch.float32


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
