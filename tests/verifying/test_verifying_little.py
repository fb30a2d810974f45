"""`verify` of what says little: tensors of few elements, and calls in which nothing of this library ran."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import functional, verifying
from fusedlayers.closeness import compare


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", range(1, 13))
def test_what_is_judged_tells_a_tenth_too_much(count: int, dtype: torch.dtype) -> None:
    truth = torch.randn(count, dtype=torch.float64)
    theirs = truth.to(dtype)
    verdict = verifying._judged(compare(theirs, theirs, truth), theirs, truth, dtype)
    for wrong in (torch.zeros_like(theirs), 0.5 * theirs, 1.1 * theirs, 1.5 * theirs):
        assert not verdict.judged or not compare(wrong, theirs, truth).ok
    assert verdict.judged or count <= 10


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 1.5 * gradient


@pytest.mark.parametrize("elements", [2, 3, 4])
def test_a_wrong_gradient_of_few_elements_does_not_pass_as_judged(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch.nn.functional.linear
    monkeypatch.setattr(
        functional.linear.__globals__["LINEAR"].__class__, "through_torch",
        lambda self, call, tensors: reference(Halves.apply(tensors[0]), *tensors[1:3]),
    )  # fmt: skip
    x, weight = torch.randn(1, elements, dtype=torch.float16), torch.randn(400, elements, dtype=torch.float16)
    found = fl.verify(functional.linear, x, weight)
    [dx] = [verdict for verdict in found.verdicts if verdict.name == "d x"]
    assert not dx.judged
    assert "are too small to judge" in str(found)


def test_nothing_is_called_close_first_where_nothing_of_ours_ran() -> None:
    x = torch.randn(30, 20)
    title, calls, *_ = str(fl.verify(nn.Linear(20, 10), x)).splitlines()
    assert title.endswith(": nothing of this library ran: every tensor is close")
    assert calls == "  calls: none of this library"
    title, *_ = str(fl.verify(functional.linear, x, torch.randn(10, 20))).splitlines()
    assert title.endswith(": no kernel of this library ran: every tensor is close")


@pytest.mark.interpreter
def test_kernels_that_ran_are_called_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    title, *_ = str(fl.verify(functional.linear, torch.randn(30, 20), torch.randn(10, 20))).splitlines()
    assert title == "fusedlayers.verify: linear on cpu, float32: every tensor is close"


def test_the_columns_say_what_errors_are_divided_by() -> None:
    text = str(fl.verify(functional.linear, torch.randn(30, 20), torch.randn(10, 20)))
    assert "max error / torch's* (limit 2.0)  RMS error / torch's* (limit 1.5)" in text
    assert "\n  * torch's error, or that of one rounding in the dtype where torch's is less" in text
