"""Training steps of replaced models: the same as torch's where torch computes them, and close in the kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.modules import FFNPieces, linear_weight
from fusedlayers.replacing.ffn.blocks import FusedBlock
from tests.models.small import TORCH_GELU_TANH, Family, Inputs
from tests.models.test_families import installed, some_families
from tests.support.ffn_blocks import count_fused_calls
from tests.support.selection import draws
from tests.support.training_runs import band_width, distance

# Bit for bit the same from the first step on, or not.
STEPS = draws(10, 50)
BAND_STEPS = 50


def _losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, family: Family, batches: list[Inputs]
) -> Iterator[float]:
    """The loss of every step."""
    for batch in batches:
        optimizer.zero_grad()
        _, loss = family.run(model, batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


def _flat(state: dict[Any, dict[str, Tensor]]) -> dict[tuple[Any, str], Tensor]:
    return {(number, key): tensor for number, entry in state.items() for key, tensor in entry.items()}


@some_families
def test_the_steps_are_the_same_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch computes replaced blocks: losses, parameters and the optimizer's state are equal bit for bit."""
    family = installed(name)
    theirs = family.build(**TORCH_GELU_TANH.get(name, {})).eval()
    ours = copy.deepcopy(theirs)
    batches = [family.inputs() for _ in range(STEPS + 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (theirs, ours)]
    # The optimizer knows the parameters from before: they stay the same objects.
    fl.replace(ours)
    calls = count_fused_calls(monkeypatch)
    curves = [
        list(_losses(model, optimizer, family, batches[:STEPS]))
        for model, optimizer in zip((theirs, ours), optimizers, strict=True)
    ]
    assert len(calls) == STEPS * family.count
    assert curves[1] == curves[0]
    assert curves[0][-1] != curves[0][0]
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[1]["param_groups"] == states[0]["param_groups"]
    their_state, our_state = (_flat(state["state"]) for state in states)
    assert our_state.keys() == their_state.keys()
    assert their_state
    assert all(torch.equal(tensor, their_state[key]) for key, tensor in our_state.items())
    # Both checkpoints go on in a model that was never replaced, and the model itself after `restore`.
    loaded = family.build(**TORCH_GELU_TANH.get(name, {})).eval()
    loaded.load_state_dict(ours.state_dict(), strict=True)
    resumed = torch.optim.AdamW(loaded.parameters(), lr=3e-3)
    resumed.load_state_dict(copy.deepcopy(states[1]))
    fl.restore(ours)
    runs = [(theirs, optimizers[0]), (ours, optimizers[1]), (loaded, resumed)]
    [one, two, three] = [list(_losses(*run, family, batches[STEPS:])) for run in runs]
    assert one == two == three
    assert len(calls) == STEPS * family.count
    for expected, *others in zip(theirs.parameters(), ours.parameters(), loaded.parameters(), strict=True):
        assert all(torch.equal(parameter, expected) for parameter in others)


# One layer, few words in a text: the interpreter is slow.
TINY: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    "GPT-2": {"n_layer": 1, "n_embd": 16, "n_inner": 24},
    "BERT": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
    "T5": {"num_layers": 1, "num_decoder_layers": 1, "d_model": 16, "d_ff": 24, "d_kv": 8},
}


def _curve(model: nn.Module, family: Family, batches: list[Inputs]) -> list[float]:
    """The losses of a copy of the model."""
    model = copy.deepcopy(model)
    # With larger steps training is chaotic: on some machines the band of its runs is as wide as the losses are large.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return list(_losses(model, optimizer, family, batches))


def _permute_hidden(model: nn.Module) -> nn.Module:
    """The same function: the hidden units in another order, and so another order of summation."""
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    for pieces in [pieces for block in blocks for pieces in block.find_ffn_pieces(block).values()]:
        assert isinstance(pieces, FFNPieces)
        order = torch.randperm(linear_weight(pieces.up).shape[0])
        with torch.no_grad():
            for linear in (pieces.up, pieces.gate):
                for tensor in (linear_weight(linear), linear.bias) if linear is not None else ():
                    if tensor is not None:
                        tensor.copy_(tensor[order].clone())
            linear_weight(pieces.down).copy_(linear_weight(pieces.down)[:, order].clone())
    return model


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["Llama", *(pytest.param(n, marks=pytest.mark.full) for n in TINY if n != "Llama")])
def test_training_stays_within_the_band_of_torch_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's runs differ in the order of the hidden units; the fused run is as close to one of them as they are."""
    family = installed(name)
    model = family.build(**TINY[name]).eval()
    batches = [{key: tensor[:2, :8].contiguous() for key, tensor in family.inputs().items()} for _ in range(BAND_STEPS)]
    fl.replace(model)
    permuted = [_permute_hidden(copy.deepcopy(model)) for _ in range(8)]
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    fused = _curve(model, family, batches)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    curves = [_curve(some, family, batches) for some in (model, *permuted)]
    band = band_width(curves)
    assert band > 0, "the orders of summation make no difference, so the band would prove nothing"
    assert min(distance(fused, curve) for curve in curves) <= band
    # A wrong activation is far outside.
    wrong = copy.deepcopy(model)
    for module in wrong.modules():
        for role in ("act", "act_fn", "intermediate_act_fn"):
            if hasattr(module, role):
                setattr(module, role, nn.Tanh())
    other = _curve(wrong, family, batches)
    assert min(distance(other, curve) for curve in curves) > band
