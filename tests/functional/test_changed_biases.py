"""A bias that is changed in place between forward and backward, as torch allows, where kernels do not read it again."""

from __future__ import annotations

import pytest
import torch

from fusedlayers.functional.switches import switched
from tests.functional.test_autograd_contract_calls import assert_same, gradients
from tests.support.contract_cases import made, upstream
from tests.support.operands import infinities, needs_kernels

pytestmark = [infinities, needs_kernels]
# Call -> the biases that its backward pass does not read, and those that it does.
BIASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("bias",), ()),
    "wide ffn": (("b_up", "b_down"), ()),
    "wide gated ffn": (("b_up",), ()),
    "ffn": (("b_down",), ("b_up",)),
    "recomputed wide ffn": (("b_down",), ("b_up",)),
    "lora_ffn": (("b_up", "b_down"), ()),
    "moe_ffn": (("b_up",), ("b_down",)),
    "recomputed moe_ffn": ((), ("b_up", "b_down")),
    "linear_cross_entropy": (("linear_bias",), ()),
    "recomputed loss": ((), ("linear_bias",)),
}
CASES = [
    (name, bias, free)
    for name, kinds in BIASES.items()
    for free, biases in zip((True, False), kinds, strict=True)
    for bias in biases
]


@pytest.mark.parametrize(("name", "bias", "free"), CASES)
def test_a_bias_that_changes(name: str, bias: str, free: bool) -> None:
    """Where its value is needed it is an error, as it is where gradients are to be differentiated."""
    with switched({"FUSEDLAYERS_BACKEND": "triton"}):
        expected = gradients(made(name))
        call = made(name)
        assert call.arguments.get(bias) is not None
        results = call()
        with torch.no_grad():
            call.arguments[bias].add_(1)
        if not free:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(results, call.leaves, upstream(results))
            return
        found = torch.autograd.grad(results, call.leaves, upstream(results), retain_graph=True)
        assert_same(list(found), expected)
        # Neither depends on these, whatever is differentiated.
        if bias not in ("bias", "b_down"):
            with pytest.raises(RuntimeError, match=f"{bias} .* was modified by an inplace operation"):
                torch.autograd.grad(results, call.leaves, upstream(results), create_graph=True)
