"""Weights whose memory changes past their version counter, by the float32 model on a CPU: nothing stale is used."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fusedlayers as fl
from tests.functional.test_float8 import M, made, operands

__all__ = ["made"]

WIDTH = 64


def values() -> Tensor:
    return torch.randn(WIDTH, WIDTH).bfloat16()


def gradient(weight: Tensor) -> Tensor:
    x = torch.ones(M, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return torch.autograd.grad(fl.functional.linear(x, weight, precision="fp8").sum(), [x])[0]


def test_a_buffer_that_is_filled_again() -> None:
    """By a compiled graph: with the weight of the next layer, which it has cast."""
    buffer = values()
    for _ in range(2):
        buffer.data.copy_(values())
        assert torch.equal(gradient(buffer), gradient(buffer.clone()))


def test_new_memory_at_the_address_of_the_old() -> None:
    memory = numpy.zeros((WIDTH, WIDTH), "int16")
    weight = Parameter(torch.from_numpy(memory).view(torch.bfloat16))
    for _ in range(2):
        memory[:] = values().view(torch.int16).numpy()
        weight.data = torch.from_numpy(memory).view(torch.bfloat16)
        assert torch.equal(gradient(weight), gradient(weight.detach().clone()))


@pytest.mark.parametrize("precision", ["rowwise", "rowwise_with_gw_hp"])
def test_new_memory_between_both_passes_under_autocast(precision: str) -> None:
    """The backward pass reads what was cast before, and the next call what was assigned."""
    given = operands(dtype=torch.float32)

    def result() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fl.functional.ffn(**given, precision=precision)

    y = result()
    given["w_up"].data = torch.randn_like(given["w_up"])
    torch.autograd.grad(y.sum(), [given["x"]])
    [found] = torch.autograd.grad(result().sum(), [given["x"]])
    given["w_up"] = given["w_up"].detach().clone().requires_grad_()
    assert torch.equal(found, torch.autograd.grad(result().sum(), [given["x"]])[0])
