"""`verify` of calls whose results and gradients are empty or zero: nothing was found right there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("rows", "scale", "reason"),
    [(0, 1.0, "y: not judged; it is empty"), (40, 0.0, "d x: not judged; it is zero, and nothing else was judged")],
    ids=["no rows", "zeros"],
)
def test_nothing_is_right_where_nothing_could_be_judged(rows: int, scale: float, reason: str) -> None:
    """A call that computes nothing gives the same empty results and the same zeros."""
    operands = [scale * normal(*shape) for shape in ((rows, 24), (64, 24), (24, 64))]
    found = fl.verify(functional.ffn, *operands)
    assert not found.ok
    assert str(found).splitlines()[0].endswith(": nothing could be judged")
    assert "every tensor is close" not in str(found)
    assert reason in str(found)


def test_a_gradient_of_zeros_is_judged_beside_others() -> None:
    x, w_up, w_down = normal(40, 24), normal(64, 24), torch.zeros(24, 64)
    found = fl.verify(functional.ffn, x, w_up, w_down)
    assert found.ok
    assert all(verdict.judged for verdict in found.verdicts), "of w_down alone the gradient is not zero"
    assert "every tensor is close" in str(found)
