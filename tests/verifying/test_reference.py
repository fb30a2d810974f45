"""The reference against operations that torch's own modules spell, and the chunks' promise about memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers import reference
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.support.operands import (
    ffn_inputs,
)

CPU = torch.device("cpu")


def filled(module: nn.Module, values: dict[str, Tensor | None]) -> nn.Module:
    module.double().load_state_dict({name: tensor.double() for name, tensor in values.items() if tensor is not None})
    return module


def test_the_ffn_of_a_sequential() -> None:
    for bias in (True, False):
        t = ffn_inputs((2, 5), 6, 18, 4, torch.float64, biases=("b_up", "b_down") if bias else (), device=CPU)
        sequential = nn.Sequential(nn.Linear(6, 18, bias=bias), nn.GELU(), nn.Linear(18, 4, bias=bias))
        names = {"0.weight": "w_up", "0.bias": "b_up", "2.weight": "w_down", "2.bias": "b_down"}
        expected = filled(sequential, {key: t[name] for key, name in names.items()})(t["x"])
        torch.testing.assert_close(reference.ffn(**t), expected)


def test_the_ffn_of_a_gated_block() -> None:
    """As Llama's MLP spells it: ``down(act(gate(x)) * up(x))``."""
    t = ffn_inputs((2, 5), 6, 18, 4, torch.float64, gated=True, residual=True, device=CPU)
    x = t["x"]
    hidden = F.silu(x @ t["w_gate"].T + t["b_gate"]) * (x @ t["w_up"].T + t["b_up"])
    expected = hidden @ t["w_down"].T + t["b_down"] + t["residual"]
    torch.testing.assert_close(reference.ffn(**t, activation="silu"), expected)


def test_the_ffn_of_a_transformer_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, activation="relu").double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    up, down = layer.linear1, layer.linear2
    ours = reference.ffn(x, up.weight, down.weight, up.bias, down.bias, activation="relu", residual=x)
    torch.testing.assert_close(ours, x + layer._ff_block(x))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gemm_gemm_is_two_batched_products(activation: str | None) -> None:
    a, b, c = (torch.randn(2, 3, *shape, dtype=torch.float64) for shape in ((5, 4), (4, 6), (6, 2)))
    middle = torch.einsum("...mk,...kn->...mn", a, b)
    middle = middle if activation is None else ACTIVATIONS[activation].torch(middle)
    expected = torch.einsum("...mn,...no->...mo", middle, c)
    torch.testing.assert_close(reference.gemm_gemm(a, b, c, activation=activation), expected)


def test_dropout_of_the_reference_is_torchs() -> None:
    t = ffn_inputs(30, 6, 18, 4, device=CPU)
    torch.manual_seed(8)
    ours = reference.ffn(**t, dropout_p=0.4)
    torch.manual_seed(8)
    hidden = F.dropout(F.gelu(F.linear(t["x"], t["w_up"], t["b_up"])), 0.4)
    assert torch.equal(ours, F.linear(hidden, t["w_down"], t["b_down"]))
