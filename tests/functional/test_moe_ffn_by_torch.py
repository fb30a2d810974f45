"""Experts in torch's own operations: its grouped products where they exist, and what they cannot take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.support.moe_operands import assert_moe_close, how, like_x, moe_inputs, results, wide
from tests.support.operands import DEVICE, on_path


class _Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses whatever would wait for the device, or whose size only the device knows."""

    REFUSED = ("_local_scalar_dense", "nonzero", "item", "unique", "masked_select", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        assert not any(word in func.name() for word in self.REFUSED), func
        return func(*args, **(kwargs or {}))


def test_torchs_path_waits_for_nothing_where_torch_has_grouped_products() -> None:
    tensors = moe_inputs(16, 32, 16, 4, 2, torch.bfloat16, routing="sentinels", layout="interleaved")
    with on_path("torch"), _Waits(), decisions() as paths:
        results(functional.moe_ffn, tensors, like_x(tensors), **how(layout="interleaved"))
    assert paths == {"moe_ffn torch": 1}
    # It takes no bias, which would be added to what is rounded already.
    sizes = (16, 32, 16, 4, 2)
    assert_moe_close(lambda: moe_inputs(*sizes, torch.bfloat16, bias=False, routing="sentinels"), path="torch")


@pytest.mark.parametrize(("K", "N"), [(16, 12), (12, 16), (16, 16)])
def test_rows_that_torchs_grouped_products_cannot_take(K: int, N: int) -> None:
    """Of a product or of its gradient: in bfloat16 both must be multiples of eight columns, and none is expanded."""

    def draw() -> dict[str, Any]:
        tensors: dict[str, Any] = moe_inputs(19, K, N, 3, 2, torch.bfloat16)
        return tensors | {"w_up": tensors["w_up"][:, :1].expand_as(tensors["w_up"])}

    assert_moe_close(draw, path="torch")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_and_its_bias_are_rounded_once(transposed: bool) -> None:
    """2047 + 2 + 1: the product alone is no number of float16 and would become 2048, and the sum 2048, too."""
    tensors = moe_inputs(5, 2, 1, 3, 1, torch.float16, gated=False, transposed=transposed, draw=torch.ones)
    tensors["x"] = torch.tensor([[2047.0, 2.0]] * 5, dtype=torch.float16, device=DEVICE)
    tensors["b_down"] = None
    with on_path("torch"):
        y = functional.moe_ffn(**tensors, **how(gated=False, transposed=transposed), activation="identity")
    assert torch.equal(y, torch.full_like(y, 2050.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_biases_are_summed_in_float32(dtype: torch.dtype) -> None:
    tensors = moe_inputs(1200, 8, 8, 2, 1, dtype, draw=torch.rand)
    frozen = ("x", "top_k_weights", "w_up", "w_down", "w_gate")
    ones = torch.ones(1200, 8, device=DEVICE, dtype=dtype)
    with on_path("torch"):
        found = results(functional.moe_ffn, tensors, ones, frozen)
    theirs = results(reference.moe_ffn, tensors, ones, frozen)
    truth = results(reference.moe_ffn, wide(tensors), ones.double(), frozen)
    sums = [{name: each[name] for name in ("db_up", "db_gate", "db_down")} for each in (found, theirs, truth)]
    assert_all_close(*sums)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:(There is a performance drop|torch.searchsorted)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transforms_of_experts_and_their_routing(dtype: torch.dtype) -> None:
    """Every batch of tokens has a routing of its own, so that nothing can read how many rows an expert has."""
    draws = [moe_inputs(5, 8, 8, 3, 2, dtype) for _ in range(2)]
    tensors = draws[0] | {"x": None, "top_k_index": None, "top_k_weights": None}
    routed = [torch.stack([d[name] for d in draws]) for name in ("x", "top_k_index", "top_k_weights")]  # type: ignore[misc]

    def loss(w_up: Tensor, x: Tensor, index: Tensor, weights: Tensor, call: Any = functional.moe_ffn) -> Tensor:
        others = tensors if w_up.dtype == dtype else wide(tensors)
        given = {"x": x, "top_k_index": index, "top_k_weights": weights, "w_up": w_up}
        return call(**(others | given)).square().sum()

    def outcome(call: Any, w_up: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
        routing, one = (x, index, weights), (x[0], index[0], weights[0])
        gradient = functools.partial(torch.func.grad(loss), call=call)
        if call is functional.moe_ffn:
            found = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0))(w_up, *routing)
        else:
            found = torch.stack([gradient(w_up, *each) for each in zip(*routing, strict=True)])
        _, slope = torch.func.jvp(lambda w_up: loss(w_up, *one, call=call), (w_up,), (w_up,))
        return {"gradients": found, "slope": slope}

    w_up = tensors["w_up"]
    exact = [each.double() if each.is_floating_point() else each for each in (w_up, *routed)]
    assert_all_close(
        outcome(functional.moe_ffn, w_up, *routed), outcome(reference.moe_ffn, w_up, *routed),
        outcome(reference.moe_ffn, *exact), independent=2 * 5 * 2,
    )  # fmt: skip
