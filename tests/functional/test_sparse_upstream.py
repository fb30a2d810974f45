"""Sparse upstream gradients, as ``torch.gather(sparse_grad=True)`` gives: the gradients of dense ones, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import functional
from tests.support.operands import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")


# Of an x [5, 8]. Missing are results that are views: torch has none of a sparse gradient, nor in its own operations.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, w_down: functional.linear(x, w),
    "ffn": lambda x, w, w_down: functional.ffn(x, w, w_down),
    "ffn, batched": lambda x, w, w_down: functional.ffn(x[None], w, w_down),
    "lora_ffn": lambda x, w, w_down: functional.lora_ffn(x, w, w_down),
    "gemm_gemm": lambda x, w, w_down: functional.gemm_gemm(x, w.mT, w_down.mT, activation="relu"),
    "gemm_gemm, batched": lambda x, w, w_down: functional.gemm_gemm(x[None], w.mT, w_down.mT, activation="relu"),
    "gemm_reduce": lambda x, w, w_down: functional.gemm_reduce(x[None], w.mT, op="max", dim=-1),
    "maxsim": lambda x, w, w_down: functional.maxsim(x[None], w[None]) + 0 * w_down.sum(),
}


def gradients(name: str, sparse: bool, *, observed: bool = False, again: bool = False) -> list[Tensor | None]:
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((5, 8), (16, 8), (8, 16))]
    with FlopCounterMode(display=False) if observed else nullcontext():
        y = CALLS[name](*leaves)
        index = torch.zeros(1, *y.shape[1:], dtype=torch.int64, device=DEVICE)
        picked = y.gather(0, index, sparse_grad=sparse)
        found = torch.autograd.grad(picked.sum(), leaves, create_graph=again, allow_unused=True)
    return [each if each is None else each.detach() for each in found]


@pytest.mark.parametrize("observed", [False, True], ids=["plain", "observed"])
@pytest.mark.parametrize("name", CALLS)
def test_they_give_the_gradients_of_dense_ones(name: str, observed: bool) -> None:
    found, expected = (gradients(name, sparse, observed=observed) for sparse in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_also_where_they_are_to_be_differentiated_again(name: str) -> None:
    found, expected = (gradients(name, sparse, again=True) for sparse in (True, False))
    torch.testing.assert_close(found, expected)
