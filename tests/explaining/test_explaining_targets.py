"""What ``explain`` takes, and the errors of what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import functional


@pytest.mark.parametrize(
    "target",
    [nn.Linear(3, 3), torch.relu, "FusedFFN", None, fl.FusedFFN],
    ids=["module", "function", "name", "none", "class"],
)
def test_other_targets_are_refused(target: Any) -> None:
    known = (
        r"target must be .* MaxSim, .* fusedlayers.functional, or one block of a model that replace\(\) fused: .*; "
        r"or a model that holds such modules, got "
    )
    with pytest.raises(TypeError, match=known + type(target).__name__):
        fl.explain(target, torch.zeros(2, 3))


def test_bad_arguments_fail_as_the_call_does() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"^x of shape"):
        fl.explain(functional.ffn, x, torch.zeros(24, 15), torch.zeros(16, 24))
    with pytest.raises(ValueError, match="activation 'swoosh' is not known"):
        fl.explain(functional.ffn, x, torch.zeros(24, 16), torch.zeros(16, 24), activation="swoosh")
    with pytest.raises(ValueError, match=r"^x of shape"):
        fl.explain(fl.FusedFFN(8, 24), x)


def test_arguments_may_be_given_by_name() -> None:
    operands = {"x": torch.zeros(2, 16), "w_up": torch.zeros(24, 16), "w_down": torch.zeros(16, 24)}
    assert fl.explain(functional.ffn, **operands) == fl.explain(functional.ffn, *operands.values())
