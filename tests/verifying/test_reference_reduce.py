"""Reductions against numbers worked out by hand: what a comparison with the reference could not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedlayers import functional, reference
from tests.support.operands import DEVICE, needs_kernels

ROWS = 7
PATHS = [pytest.param("kernels", marks=needs_kernels), "auto"]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 1), (3, ROWS)])
@pytest.mark.parametrize(
    ("options", "expected", "gradient"),
    [
        ({"op": "mean"}, 1.0, 1 / ROWS),
        ({"op": "mean", "activation": "relu"}, 1.0, 1 / ROWS),
        ({"op": "mean", "bias": True}, 2.0, 1 / ROWS),
        ({"op": "sum"}, 7.0, 1.0),
        ({"op": "sum", "bias": True}, 14.0, 1.0),
        ({"op": "max", "bias": True}, 2.0, None),
    ],
)
def test_a_mask_of_one_value_for_all_rows(
    path: str, shape: tuple[int, ...], options: dict[str, Any], expected: float, gradient: float | None
) -> None:
    a, b = torch.ones(3, ROWS, 1, device=DEVICE), torch.ones(3, 1, 2, device=DEVICE)
    given = {**options, "mask": torch.ones(shape, dtype=torch.bool, device=DEVICE)}
    if given.pop("bias", False):
        given["bias"] = torch.ones(2, device=DEVICE)
    a.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDLAYERS_BACKEND", "triton" if path == "kernels" else path)
        found = functional.gemm_reduce(a, b, **given)
        found.sum().backward()
    assert torch.equal(found, torch.full((3, 2), expected, device=DEVICE))
    if gradient is not None:
        torch.testing.assert_close(a.grad, torch.full_like(a, 2 * gradient))


@pytest.mark.parametrize("taking", [{}, {"lengths": torch.tensor(3000)}, {"mask": torch.ones(3000, dtype=torch.bool)}])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_mean_does_not_overflow_where_its_sum_does(taking: dict[str, Any], activation: str | None) -> None:
    a, one = torch.full((3000, 1), 6000.0).half(), torch.ones(1, 1).half()
    found = functional.gemm_reduce(a, one, op="mean", activation=activation, **taking)
    assert found.item() == 6000
    bias = torch.full((1,), 1000.0).half()
    found = functional.gemm_reduce(a, one, op="mean", activation=activation, bias=bias, **taking)
    assert found.item() == 7000


def test_a_mean_over_columns_takes_the_mean_of_the_bias() -> None:
    bias = torch.arange(4.0)
    a, b = torch.ones(2, 1), torch.zeros(1, 4)
    mask = torch.tensor([True, False, True, True])
    assert torch.equal(functional.gemm_reduce(a, b, op="mean", dim=-1, bias=bias), torch.full((2,), 1.5))
    assert torch.equal(functional.gemm_reduce(a, b, op="mean", dim=-1, bias=bias, mask=mask), torch.full((2,), 5 / 3))
    assert torch.equal(functional.gemm_reduce(a, b, op="sum", dim=-1, bias=bias, mask=mask), torch.full((2,), 5.0))
    wide = torch.ones(70_000).half()
    found = functional.gemm_reduce(a.half(), torch.ones(1, 70_000).half(), op="mean", dim=-1, bias=wide)
    assert torch.equal(found, torch.full((2,), 2.0).half())


@pytest.mark.parametrize("op", ["sum", "mean", "max", "absmax", "sumsq", "logsumexp"])
@pytest.mark.parametrize("product", [False, True])
def test_results_have_the_dtype_of_autocast(op: str, product: bool) -> None:
    a, b, bias = torch.randn(3, 7, 8), torch.randn(3, 8, 9), torch.randn(9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = functional.gemm_reduce(a, b, op=op, bias=bias, return_product=product)
    for tensor in found if product else (found,):
        assert tensor.dtype == torch.bfloat16
    (found[0] if product else found).float().sum().backward()
    assert bias.grad.dtype == torch.float32


def test_packed_sequences_on_the_meta_device() -> None:
    packed, documents = torch.empty(7, 8, device="meta"), torch.empty(3, 7, 8, device="meta")
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    assert functional.maxsim(packed, documents, cu_seqlens_queries=offsets).shape == (2, 3)
    assert functional.maxsim(documents, packed, cu_seqlens_documents=offsets).shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"op": ["max"]}, r"op must be one of sum, .*, got \['max'\]"), ({"dim": -1.0}, "dim must be -2 .*, got -1.0")],
)
def test_arguments_of_another_type_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        functional.gemm_reduce(torch.ones(2, 3), torch.ones(3, 4), **options)


def test_the_mean_of_nothing_has_no_gradient() -> None:
    a = torch.ones(2, 3, 1, requires_grad=True)
    for call in (reference.gemm_reduce, reference.gemm_sum):
        a.grad = None
        found = call(a, torch.ones(2, 1, 1), op="mean", mask=torch.tensor([[True], [False]]))
        assert found[0].item() == 1
        assert found[1].isnan().all()
        found[0].sum().backward()
        assert torch.equal(a.grad, torch.tensor([1 / 3, 0.0]).view(2, 1, 1).expand(2, 3, 1))
