"""What torch's own linear_cross_entropy takes beyond classes ``[*B]`` of a weight ``[V, K]``, with torch's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import explain, functional
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.loss_operands import PATHS, REDUCTIONS, loss_inputs, on_path, results
from tests.support.operands import DEVICE, needs_kernels

POSITIONS = [(1,), (3,), (2, 3)]
N, V, K = 5, 7, 4


def several(positions: tuple[int, ...], dtype: torch.dtype = torch.float64, bias: bool = True) -> dict[str, Any]:
    """Tensors by name of a token's losses at all positions, some of which are ignored."""
    target = torch.randint(V, (N, *positions))
    target.view(-1)[:2] = -100
    found = {"input": torch.randn(N, K, dtype=dtype), "linear_weight": torch.randn(V, *positions, K, dtype=dtype)}
    found["linear_bias"] = torch.randn(V, *positions, dtype=dtype) if bias else None  # type: ignore[assignment]
    return found | {"target": target}


def written_out(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any = None, **options: Any
) -> Tensor:
    """torch's documentation of linear_cross_entropy in its own operations, which every release of it has."""
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias).reshape(len(input), *linear_weight.shape[:-1])
    return F.cross_entropy(logits, target, **options)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"ignore_index": 3}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_several_losses_of_a_token(
    positions: tuple[int, ...], reduction: str, options: dict[str, Any], bias: bool
) -> None:
    inputs = several(positions, bias=bias)
    inputs["target"] = inputs["target"].clamp(min=0) if "ignore_index" in options else inputs["target"]
    options = {"reduction": reduction, "weight": torch.rand(V, dtype=torch.float64)} | options
    found, theirs = (results(call, inputs, **options) for call in (functional.linear_cross_entropy, written_out))
    torch.testing.assert_close(found, theirs)


def test_explain_says_why_torch_runs_several_losses() -> None:
    text = str(explain(functional.linear_cross_entropy, **several((2, 3), torch.float32), details=True))
    assert "the kernel takes one loss of each token" in text
    assert "V=7 (vocabulary) × 6 positions" in text


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_of_several_losses(reduction: str) -> None:
    inputs = several((2, 3)) | {"target": torch.rand(N, V, 2, 3, dtype=torch.float64).softmax(1)}
    found, theirs = (
        results(call, inputs, reduction=reduction) for call in (functional.linear_cross_entropy, written_out)
    )
    torch.testing.assert_close(found, theirs)


def test_several_losses_of_many_leading_dimensions_and_compiled() -> None:
    inputs = several((3,))
    expected = functional.linear_cross_entropy(**inputs, reduction="none")
    wider = inputs | {"input": inputs["input"].unflatten(0, (1, N)), "target": inputs["target"].unflatten(0, (1, N))}
    torch.testing.assert_close(
        functional.linear_cross_entropy(**wider, reduction="none"), expected.unflatten(0, (1, N))
    )
    compiled = torch.compile(functional.linear_cross_entropy, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs, reduction="none"), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_ignore_index_is_torchs_default(path: str, reduction: str) -> None:
    inputs = loss_inputs((13,), 24, 70, bias=True)
    with on_path(path):
        found = [
            results(functional.linear_cross_entropy, inputs, reduction=reduction, **options)
            for options in ({}, {"ignore_index": None}, {"ignore_index": -100})
        ]
    torch.testing.assert_close(found[0], results(written_out, inputs, reduction=reduction), rtol=1e-5, atol=1e-6)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs"])
@pytest.mark.parametrize("ignored", [None, 7])
def test_classes_of_eight_bits(path: str, name: str, ignored: int | None) -> None:
    """None of them is ignored by default: -100 is none of these numbers, and 156, its bits, is a class."""
    inputs = loss_inputs((13,), 24, 200, ignored=0)
    target = inputs["target"]
    target[:3] = torch.tensor([7, 156, 199], device=DEVICE)
    call = getattr(functional, name)
    options: dict[str, Any] = {"ignore_index": ignored}
    if name == "linear_cross_entropy":
        options |= {"label_smoothing": 0.1, "z_loss": 1e-3}
    with on_path(path):
        found = results(call, inputs | {"target": target.to(torch.uint8)}, **options)
        torch.testing.assert_close(found, results(call, inputs, **options), rtol=0, atol=0)


def test_an_ignored_class_beside_probabilities_is_an_error() -> None:
    """As in torch; no class can be ignored where a target has a share of all of them."""
    inputs = loss_inputs((5,), 8, 11) | {"target": torch.rand(5, 11, device=DEVICE).softmax(-1)}
    with pytest.raises(ValueError, match="ignore_index must be None where target holds probabilities"):
        functional.linear_cross_entropy(**inputs, ignore_index=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"input": torch.zeros(K), "target": torch.zeros(3, dtype=torch.int64)},
            "input of shape [4] and dtype torch.float32 on cpu: expected [*B, K], at least two",
        ),
        ({"target": torch.zeros(N, 2, dtype=torch.int64)}, "expected [*B, *D] = [5, 3], as input is [*B, K]"),
        (
            {"target": torch.zeros(N, V)},
            "expected [*B, V, *D] = [5, 7, 3], as input is [*B, K] = [5, 4] and linear_weight is [V, *D, K]",
        ),
        (
            {"linear_bias": torch.zeros(V)},
            "linear_bias of shape [7] and dtype torch.float32 on cpu: expected [V, *D] =",
        ),
        (
            {"linear_weight": torch.zeros(V, 3, 5)},
            "[*B, K] with K = 5, as linear_weight is [V, *D, K] = [7, 3, 5]",
        ),
    ],
)
def test_bad_input(change: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        functional.linear_cross_entropy(**(several((3,), torch.float32) | change))
    assert words in str(raised.value)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss")
@pytest.mark.parametrize(
    ("path", "options"),
    [
        pytest.param("chunked", {}, marks=needs_kernels),
        ("torch", {}),
        ("torch", {"out_features": (2, 3), "bias": True}),
    ],
    ids=str,
)
def test_torchs_module(path: str, options: dict[str, Any]) -> None:
    """By default, and with several losses of a token, which torch alone computes."""
    modules = []
    for kind in (fl.LinearCrossEntropyLoss, nn.LinearCrossEntropyLoss):
        torch.manual_seed(3)
        modules.append(kind(K, V, **options).to(DEVICE))
    ours, theirs = modules
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert ours.ignore_index is theirs.ignore_index is None
    input = torch.randn(N, K, device=DEVICE)
    target = torch.randint(V, (N, *options.get("out_features", ())), device=DEVICE)
    with on_path(path):
        torch.testing.assert_close(ours(input, target), theirs(input, target), rtol=1e-5, atol=1e-6)
    # A layer that is called for its logits.
    ours.linear.register_forward_hook(lambda module, inputs, output: None)
    torch.testing.assert_close(ours(input, target), theirs(input, target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("out_features", [3, (0,), (2.0,), "3"], ids=str)
def test_out_features_that_are_none(out_features: Any) -> None:
    with pytest.raises(TypeError, match="out_features must be a tuple of positive ints"):
        fl.LinearCrossEntropyLoss(K, V, out_features=out_features)
