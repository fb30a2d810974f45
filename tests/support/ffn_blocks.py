"""What the tests of modules and of replacing share: FFN blocks, children that are not plain, and exact comparison."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import functional, reference
from fusedlayers.kernels.dropout import draw_seed
from fusedlayers.replacing import FFNRule
from tests.support.operands import patch_ffn


def replaced(block: nn.Module) -> nn.Module:
    """The block as `replace` leaves or makes it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was replaced")
        fl.replace(block)
    return block


class GatedBlock(nn.Module):
    """A block as users write it: gated, dropout on the hidden as a number, dropout on the result as a module."""

    def __init__(self, activation: object = None, p: float = 0.0) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 10)
        self.gate = nn.Linear(6, 10, bias=False)
        self.proj = nn.Linear(10, 6)
        self.act = nn.SiLU() if activation is None else activation
        self.p = p
        self.drop = nn.Dropout(p)
        self.norm = nn.Identity()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.act(self.gate(x)) * self.fc(x)
        return self.drop(self.proj(F.dropout(hidden, self.p, self.training))) * scale


class Layer(nn.Module):
    """What layers with an FFN inside have; each writes its method anew."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.attention, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.act, self.drop, self.norm = nn.SiLU(), nn.Dropout(p), nn.LayerNorm(10)
        self.p = p


def pair(kind: Callable[[float], nn.Module], p: float) -> tuple[Any, Any]:
    """A layer as it was, and its copy, which is to be replaced."""
    torch.manual_seed(0)
    own = kind(p)
    return own, copy.deepcopy(own)


def rule_for(kind: type[nn.Module]) -> FFNRule:
    return FFNRule(kind, up="fc", down="proj", gate="gate", activation="act", dropout="p", output_dropout="drop")


def mlp(activation: nn.Module | None = None, p: float | None = None) -> nn.Sequential:
    if p is None:
        return nn.Sequential(nn.Linear(6, 10), activation or nn.GELU(), nn.Linear(10, 6))
    return nn.Sequential(nn.Linear(6, 10), activation or nn.GELU(), nn.Dropout(p), nn.Linear(10, 6), nn.Dropout(p))


def long_sequence() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.LayerNorm(6), up=nn.Linear(6, 10), act=nn.Tanh(), drop=nn.Dropout(0.5), down=nn.Linear(10, 4)
        )
        | {"relu": nn.ReLU(), "head": nn.Linear(4, 8), "silu": nn.SiLU(inplace=True), "last": nn.Linear(8, 6)}
    )


class Decoder(nn.Module):
    """A decoder layer with its memory inside, so that every block here is a function of one tensor."""

    def __init__(self, activation: object, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(6, 2, 10, 0.25, activation, norm_first=norm_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.detach() + 1)


def encoder(activation: object, norm_first: bool, batch_first: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(6, 2, 10, 0.25, activation, norm_first=norm_first, batch_first=batch_first)


# Every pattern, with the number of FFNs in it.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "sequential": (mlp, 1),
    "sequential with dropout": (lambda: mlp(nn.ReLU(inplace=True), 0.5), 1),
    "long sequence": (long_sequence, 2),
    "three linears": (lambda: nn.Sequential(*mlp(nn.ReLU()), nn.ReLU(), nn.Linear(6, 6)), 1),
    "encoder, function": (lambda: encoder(F.gelu, False, True), 1),
    "encoder, module": (lambda: encoder(nn.SiLU(), True, False), 1),
    "encoder, name": (lambda: encoder("relu", True, True), 1),
    "decoder": (lambda: Decoder("relu", False), 1),
    "decoder, norm first": (lambda: Decoder(F.gelu, True), 1),
    "rule": (lambda: GatedBlock(p=0.5), 1),
    "rule, function": (lambda: GatedBlock(torch.tanh), 1),
}


class LowRank(nn.Module):
    """A frozen linear plus a trainable product of two thin ones: what LoRA libraries put in a linear's place."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 2, bias=False)
        self.b = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class TaggedTensor(Tensor):
    """A tensor subclass, as quantised and sharded parameters are."""


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


@contextmanager
def seeded_dropout() -> Iterator[None]:
    """Inside, torch's dropout draws its masks as `functional.ffn` does, so that a block equals its fused form."""

    own = F.dropout
    # Remembered with torch's own dropout: Dynamo asks once in a process which functions a stand-in can answer.
    torch.overrides.get_overridable_functions()

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and p):
            return input
        # A hidden that is not computed yet is none of torch's tensors, and has its own answer.
        if not isinstance(input, Tensor):
            return own(input, p, training, inplace)
        dropped = reference.dropped(input, p, draw_seed(input.device))
        return input.copy_(dropped) if inplace else dropped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield


def results(model: nn.Module, *inputs: Tensor, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor | None]:
    """y of ``model`` or ``call``, and all gradients for a random gradient of y; dropout draws the same every time."""
    inputs = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    model.zero_grad()
    torch.manual_seed(1)
    with seeded_dropout():
        y = (call or model)(*inputs)
    torch.manual_seed(2)
    # Drawn in float32, so that it is the same for a float64 twin.
    y.backward(torch.randn(y.shape).to(y.device, y.dtype))
    found = {"y": y.detach()} | {f"dx{place}": tensor.grad for place, tensor in enumerate(inputs)}
    return found | {f"d{name}": parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or torch.equal(tensor, other), name


def pickled(ffn: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(ffn))


def saved(ffn: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(ffn, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def count_fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The dropout probability of every call of ``functional.ffn`` from here on."""
    calls: list[float] = []

    def counted(**arguments: object) -> Tensor:
        calls.append(arguments["dropout_p"])
        return functional.ffn(**arguments)

    patch_ffn(monkeypatch, counted)
    return calls
