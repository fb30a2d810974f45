"""What every module says of an input that does not fit it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

WRONG = torch.randn(3, 9)
WIDTH = (
    r"of shape \[3, 9\] and dtype torch.float32 on cpu: expected \[\*B, "
    r"((M, )?K\] with K = 8, as .* is|M, 8\], as d_model is 8$)"
)


@pytest.mark.parametrize(
    ("name", "module", "inputs"),
    [
        ("x", fl.FusedFFN(8, 16), (WRONG,)),
        ("x", fl.FusedFFN(8, 9, gated=True), (WRONG,)),
        ("x", fl.SplitKLinear(8, 16), (WRONG,)),
        ("x", fl.FusedMoE(8, 16, num_experts=4, top_k=2), (WRONG,)),
        ("input", fl.LinearCrossEntropyLoss(8, 16), (WRONG, torch.zeros(3, dtype=torch.int64))),
    ],
    ids=["ffn", "as wide as the hidden", "linear", "experts", "loss"],
)
def test_an_input_of_another_width_is_named(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Not the weight, which is what the module was asked for."""
    with pytest.raises(ValueError, match=f"^{name} {WIDTH}"):
        module(*inputs)
