"""Tensors that are plain by their type, but not what their memory says: dual, negated, sparse, without axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from fusedlayers import functional, reference
from tests.support import seeds

# Torch's own, at the first forward-mode derivative and the first sparse matrix.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
]

# Of whole numbers every result is exact, so that right ones are equal. The same in every process: with some of them all
# probabilities are right, and a loss has no gradient.
WEIGHT = torch.randint(-9, 10, (6, 8), generator=seeds.generator(1)).float()
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "ffn": lambda x: functional.ffn(x, WEIGHT, WEIGHT.T.contiguous(), activation="relu"),
    "recomputed ffn": lambda x: functional.ffn(x, WEIGHT, WEIGHT.T.contiguous(), activation="relu", recompute=True),
    "linear": lambda x: functional.linear(x, WEIGHT),
    "gemm_gemm": lambda x: functional.gemm_gemm(x, WEIGHT.T, WEIGHT),
    "gemm_reduce": lambda x: functional.gemm_reduce(x, WEIGHT.T, op="max"),
    "maxsim": lambda x: functional.maxsim(x[None], WEIGHT[None]),
    # Of two logits far apart the probabilities are 0 and 1.
    "linear_cross_entropy": lambda x: functional.linear_cross_entropy(
        x, WEIGHT[:2], torch.arange(5) % 2, reduction="sum", logit_scale=1024.0
    ),
    "weight_gradient": lambda x: functional.weight_gradient(x, x.detach())[0],
}


def drawn(*shape: int) -> Tensor:
    return torch.randint(-99, 100, shape).float()


def negated(*shape: int) -> Tensor:
    """A tensor whose memory holds the negatives of its values."""
    found = torch.complex(torch.zeros(shape), drawn(*shape)).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_derivatives(name: str) -> None:
    """Those of reverse mode."""
    # Of integers a derivative may be 0 by chance.
    for _ in range(4):
        x, tangent = drawn(5, 8), drawn(5, 8)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(CALLS[name](forward_ad.make_dual(x, tangent))).tangent
        if found.any():
            break
    leaf = x.clone().requires_grad_()
    y = CALLS[name](leaf)
    dy = torch.randint_like(y, -3, 4)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert found.any()
    assert torch.equal((found.double() * dy).sum(), (tangent.double() * dx).sum())


@pytest.mark.parametrize("name", [name for name in CALLS if name != "weight_gradient"])
def test_kernels_do_not_take_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward-mode|no Triton"):
        CALLS[name](forward_ad.make_dual(torch.randn(5, 8), torch.randn(5, 8)))
    with pytest.raises(RuntimeError, match=r"an operand is a negated view|no Triton"):
        CALLS[name](negated(5, 8))


@pytest.mark.parametrize("name", CALLS)
def test_negated_operands(name: str) -> None:
    x = negated(5, 8)
    for _ in range(2):  # planned, and recalled
        assert torch.equal(CALLS[name](x), CALLS[name](x.resolve_neg()))


def test_operands_of_wide_layers_that_are_no_matrices() -> None:
    x, w_up, w_down = drawn(4, 512), torch.randint(-3, 4, (16, 512)).float(), torch.randint(-3, 4, (8, 16)).float()
    found = functional.ffn(x, w_up.to_sparse_csr(), w_down, activation="relu")
    assert torch.equal(found, reference.ffn(x, w_up, w_down, activation="relu"))
    with pytest.raises(ValueError, match=r"^w_up of shape \[\]"):
        functional.ffn(x, torch.zeros(5)[1], w_down)
