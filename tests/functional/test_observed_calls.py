"""Calls that a dispatch mode observes, as compiled graphs make them: what was prepared for one serves no other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import functional
from fusedlayers.functional import custom_ops, operation
from fusedlayers.kernels import launching
from tests.support.operands import forget_calls


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, set[tuple[torch.dtype | None, ...]]]]:
    """The dtypes that every prepared launch was given: on a GPU it reads them all as those of the first time."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    for each in operation.OPERATIONS.values():
        each.kernel_operation.calls.clear()
    forget_calls()
    given: dict[Any, set[tuple[torch.dtype | None, ...]]] = {}
    run = launching.Launch.__call__

    def note(self: Any, tensors: tuple[Any, ...]) -> None:
        dtypes = tuple(None if each is None else each.dtype for each in tensors)
        given.setdefault(self, set()).add(dtypes)
        run(self, tensors)

    monkeypatch.setattr(launching.Launch, "__call__", note)
    yield given
    forget_calls()


def experts(convert: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    x, w_up, w_down = torch.randn(8, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 16)
    index, weights = convert(torch.arange(16).view(8, 2) % 4, torch.rand(8, 2))
    return functional.moe_ffn(x, index, weights, w_up, w_down)


def similarities(convert: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    ends = convert(torch.tensor([0, 5, 12]), torch.tensor([0, 4, 15]))
    return functional.maxsim(
        torch.randn(12, 8), torch.randn(15, 8), cu_seqlens_queries=ends[0], cu_seqlens_documents=ends[1]
    )


CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "int32 experts": (experts, lambda index, weights: (index.int(), weights)),
    "float16 weights of experts": (experts, lambda index, weights: (index, weights.half())),
    "float64 weights of experts": (experts, lambda index, weights: (index, weights.double())),
    "int32 ends of documents": (similarities, lambda queries, documents: (queries.int(), documents.int())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_prepared_launch_is_always_given_the_same_dtypes(
    change: str, told: dict[Any, set[tuple[torch.dtype | None, ...]]]
) -> None:
    call, convert = CHANGES[change]
    with FlopCounterMode(display=False):
        for given in (lambda *pair: pair, convert, lambda *pair: pair):
            call(given)
    assert len(told) >= 2
    assert [dtypes for dtypes in told.values() if len(dtypes) > 1] == []


def test_results_of_an_operation_have_no_memory_in_common() -> None:
    """Neither the same tensor twice, nor halves of one; what has memory of its own is not copied."""
    whole, alone = torch.randn(4, 6), torch.randn(3)
    for results in ([whole, whole, alone], [whole[:2], alone, whole[2:]], [whole[2:], whole[:2], alone]):
        found = custom_ops._apart(results)
        assert len({each.untyped_storage().data_ptr() for each in found}) == 3
        assert all(torch.equal(each, result) for each, result in zip(found, results, strict=True))
    assert all(each is result for each, result in zip(custom_ops._apart([whole, alone]), [whole, alone], strict=True))
