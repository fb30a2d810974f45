"""Operations where hooks pack what autograd saves: in checkpoints, and where it is kept on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedlayers import functional
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.functional.test_hidden_gradient import KERNELS_AND_TORCH
from tests.functional.test_hidden_gradient import inputs as hidden_gradient_inputs
from tests.support.operands import leaves, on_path


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "save_on_cpu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("path", KERNELS_AND_TORCH)
def test_hooks_on_what_autograd_saves(path: str, activation: str, gated: bool, way: str) -> None:
    """They change nothing; a reentrant checkpoint runs without a graph first, where silu's gradient rounds once."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(("dy", "w_down", "z", "z_gate"), tensors, strict=False))
        found = functional.hidden_gradient(**named, activation=activation)
        return tuple(tensor for tensor in found if tensor is not None)

    def hooked(*tensors: Tensor) -> tuple[Tensor, ...]:
        if way == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return call(*tensors)
        return checkpoint(call, *tensors, use_reentrant=way.startswith("reentrant"))

    def everything(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        tensors = [tensor for tensor in leaves(given).values() if tensor is not None]
        found = function(*tensors)
        sum(tensor.square().sum() for tensor in found).backward()
        with torch.no_grad():
            again = function(*tensors)
        return [*found, *again, *(tensor.grad for tensor in tensors if tensor.grad is not None)]

    given = hidden_gradient_inputs(9, 7, 5, gated=gated)
    with on_path(path):
        for one, other in zip(everything(hooked), everything(call), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_what_comes_back_is_what_was_saved(change: str) -> None:
    """The launches of a backward pass are those of the call before, and read tensors of the same kind."""

    def change_it(tensor: Tensor) -> Tensor:
        return tensor.half() if change == "dtype" else tensor[:-1]

    queries, documents = torch.randn(2, 5, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    with on_path("kernels"):
        functional.maxsim(queries, documents).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(change_it, lambda tensor: tensor):
            scores = functional.maxsim(queries, documents)
        with pytest.raises(RuntimeError, match=r"maxsim saved torch.float32 \[2, 5, 8\] .* and got .* back"):
            scores.sum().backward()
