"""`LinearCrossEntropyLoss` is torch's module of that name: arguments, state, copies; a child that must be called is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fusedlayers as fl
from fusedlayers import LinearCrossEntropyLoss, functional
from fusedlayers.functional.dispatch import decisions
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.loss_operands import CHUNKED, on_path
from tests.support.operands import DEVICE, needs_kernels

needs_torch_module = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss"
)
OPTIONS: dict[str, Any] = {"reduction": "sum", "ignore_index": 3, "label_smoothing": 0.2}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 6, device=DEVICE), torch.arange(9, device=DEVICE) % 4


def filled(module: nn.Module, *call: Tensor) -> dict[str, Tensor]:
    """The loss, and the gradients of parameters by name."""
    module.zero_grad()
    loss = module(*call)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@needs_torch_module
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("path", [CHUNKED, "torch"])
def test_it_is_torchs_module(bias: bool, path: str) -> None:
    """The same draws, the same state, the same loss."""
    weight = torch.rand(5)
    torch.manual_seed(3)
    ours = LinearCrossEntropyLoss(6, 5, bias=bias, weight=weight, **OPTIONS)
    torch.manual_seed(3)
    theirs = nn.LinearCrossEntropyLoss(6, 5, bias=bias, weight=weight, **OPTIONS)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    call = batch()
    with on_path(path):
        found = filled(ours.to(DEVICE), *call)
    torch.testing.assert_close(found, filled(theirs.to(DEVICE), *call), rtol=1e-5, atol=1e-6)


@needs_kernels
def test_recompute_reaches_the_function() -> None:
    layer = LinearCrossEntropyLoss(24, 70, recompute=True, device=DEVICE)
    call = torch.randn(9, 24, device=DEVICE), torch.arange(9, device=DEVICE)
    with on_path("recomputed"), decisions() as paths:
        found = filled(layer, *call)
    assert dict(paths) == {"linear_cross_entropy fused": 1}
    assert "recompute=True" in repr(layer)
    with on_path("torch"):
        torch.testing.assert_close(found, filled(layer, *call), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="recompute must be True or False"):
        LinearCrossEntropyLoss(24, 70, recompute="auto")  # type: ignore[arg-type]


def test_copies_pickles_and_conversions() -> None:
    layer = LinearCrossEntropyLoss(6, 5, bias=True, softcap=4.0, logit_scale=0.5, z_loss=0.1, weight=torch.rand(5))
    call = tuple(tensor.cpu() for tensor in batch())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(*call), layer(*call))
        assert other.options().keys() == layer.options().keys()
    assert layer.half().linear.weight.dtype == torch.float16
    layer = LinearCrossEntropyLoss(6, 5, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.linear.weight.isfinite().all()
    layer.eval()
    assert layer(*call).isfinite()


def test_what_it_shows() -> None:
    layer = LinearCrossEntropyLoss(6, 5, softcap=4, **OPTIONS)
    shown = repr(layer)
    assert "reduction='sum', ignore_index=3, label_smoothing=0.2, softcap=4.0, logit_scale=1.0, z_loss=0.0" in shown
    assert "(linear): Linear(in_features=6, out_features=5, bias=False)" in shown
    text = fl.explain(layer, *(tensor.cpu() for tensor in batch()), details=True)
    assert "linear_cross_entropy: Σ cross_entropy(logits)" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "average"}, "reduction must be one of none, mean, sum"),
        ({"label_smoothing": -0.1}, "label_smoothing must be a number from 0 to 1"),
        ({"ignore_index": "3"}, "ignore_index must be an int or None"),
        ({"softcap": 0}, "softcap must be a positive number or None"),
        ({"logit_scale": "1"}, "logit_scale must be a finite number"),
        ({"z_loss": -1.0}, "z_loss must be a number from 0 on"),
        ({"weight": torch.ones(4)}, "weight of shape [4]"),
        ({"weight": [1.0] * 5}, "weight must be a torch.Tensor or None"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        LinearCrossEntropyLoss(6, 5, **options)
    assert words in str(raised.value)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, inputs, output: output + 1)
    return linear


def doubled(linear: nn.Linear) -> nn.Module:
    other = Doubled(6, 5, bias=True)
    other.load_state_dict(linear.state_dict())
    return other


@pytest.mark.parametrize("change", [hooked, doubled, parametrizations.weight_norm], ids=lambda change: change.__name__)
def test_a_child_that_is_not_plain_is_called(change: Any) -> None:
    layer = LinearCrossEntropyLoss(6, 5, bias=True, softcap=4.0, z_loss=0.1, **OPTIONS)
    layer.linear = change(layer.linear)
    call = tuple(tensor.cpu() for tensor in batch())
    with decisions() as paths:
        loss = layer(*call)
    assert not paths
    logits = layer.linear(call[0])
    # The logits are those of an identity.
    expected = functional.linear_cross_entropy(logits, torch.eye(5), call[1], **layer.options())
    torch.testing.assert_close(loss, expected)
    assert "calls its children instead of fusing them: linear" in fl.explain(layer, *call, details=True)


@pytest.mark.parametrize("path", [CHUNKED, "torch"])
def test_compiled(path: str) -> None:
    layer, call = LinearCrossEntropyLoss(6, 5, bias=True, weight=torch.rand(5)).to(DEVICE), batch()
    with on_path(path):
        found = filled(torch.compile(layer, backend="aot_eager", fullgraph=True), *call)
        torch.testing.assert_close(
            {key.removeprefix("_orig_mod."): t for key, t in found.items()}, filled(layer, *call)
        )


def test_a_tied_embedding_gets_both_gradients() -> None:
    embedding, loss = nn.Embedding(5, 6, device=DEVICE), LinearCrossEntropyLoss(6, 5, device=DEVICE)
    loss.linear.weight = embedding.weight
    tokens = torch.arange(4, device=DEVICE)
    loss(embedding(tokens), tokens).backward()
    twin = embedding.weight.detach().clone().requires_grad_()
    nn.functional.cross_entropy(twin[tokens] @ twin.T, tokens).backward()
    torch.testing.assert_close(embedding.weight.grad, twin.grad)
