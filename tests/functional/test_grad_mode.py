"""What sampling computes, training computes: losses and log-probabilities have the same bits in every grad mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedlayers import LinearCrossEntropyLoss, functional
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.loss_operands import CHUNK_ROWS, FLOATING, PATHS, REDUCTIONS, loss_inputs, on_path
from tests.support.operands import DEVICE, DTYPES

# Rows of logits of several chunks, columns of several tiles and of several parts whose gradient is taken.
TOKENS, K, V = 3 * CHUNK_ROWS + 5, 24, 300
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "log_probs": (functional.linear_log_probs, {}),
    "entropies": (functional.linear_log_probs, {"return_entropy": True}),
    "capped": (functional.linear_log_probs, {"softcap": 5.0, "logit_scale": 1.5}),
    **{
        reduction: (functional.linear_cross_entropy, {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3})
        for reduction in REDUCTIONS
    },
}
FROZEN = [(), ("input",), ("linear_weight", "linear_bias"), ("input", "linear_bias")]


def values(call: Callable[..., Any], inputs: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    found = call(**inputs, **options)
    return [each.detach() for each in (found if isinstance(found, tuple) else (found,))]


def of_every_mode(call: Callable[..., Any], inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The values by grad mode, the gradients taken in between so that a training step is complete."""
    leaves = [each for each in inputs.values() if each is not None and each.requires_grad]
    found = {"grad": values(call, inputs, options)}
    with torch.no_grad():
        found["no_grad"] = values(call, inputs, options)
    with torch.inference_mode():
        found["inference_mode"] = [each.clone() for each in values(call, inputs, options)]
    outputs = call(**inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    before = [each.detach().clone() for each in outputs]
    torch.autograd.grad(sum(each.sum() for each in outputs), leaves)
    found["after the backward pass"] = before
    again = checkpoint(lambda: call(**inputs, **options), use_reentrant=False)
    found["checkpoint"] = [each.detach() for each in (again if isinstance(again, tuple) else (again,))]
    return found


def assert_same(found: dict[str, list[Tensor]]) -> None:
    first = found["grad"]
    for mode, other in found.items():
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one, two), (mode, (one - two).abs().max())


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("frozen", FROZEN, ids=str)
def test_values_do_not_depend_on_grad_mode(name: str, frozen: tuple[str, ...], dtype: torch.dtype, path: str) -> None:
    call, options = CALLS[name]
    inputs = loss_inputs((TOKENS,), K, V, dtype, bias=True, peak=3.0)
    for each in FLOATING:
        inputs[each].requires_grad_(each not in frozen)  # type: ignore[union-attr]
    with on_path(path):
        assert_same(of_every_mode(call, inputs, options))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["log_probs", "mean"])
def test_under_autocast(name: str, path: str) -> None:
    call, options = CALLS[name]
    inputs = loss_inputs((TOKENS,), K, V, bias=True)
    for each in FLOATING:
        inputs[each].requires_grad_()  # type: ignore[union-attr]
    with on_path(path), torch.autocast(DEVICE.type, torch.float16):
        assert_same(of_every_mode(call, inputs, options))


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["log_probs", "mean", "none"])
def test_compiled(name: str, path: str) -> None:
    """Compiled with and without gradients, kernels give the bits that they give uncompiled."""
    call, options = CALLS[name]
    inputs = loss_inputs((TOKENS,), K, V, torch.float16)
    for each in ("input", "linear_weight"):
        inputs[each].requires_grad_()  # type: ignore[union-attr]
    with on_path(path):
        eager = values(call, inputs, options)
        compiled = torch.compile(call, backend="aot_eager")
        found = {"grad": eager, "compiled": values(compiled, inputs, options)}
        with torch.no_grad():
            found["compiled without gradients"] = values(compiled, inputs, options)
        assert_same(found)


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_are_the_same_however_they_are_asked_for(path: str) -> None:
    """With entropies and without, with ``recompute`` and without, and as the negated losses of tokens."""
    inputs = loss_inputs((TOKENS,), K, V, torch.float16, peak=3.0)
    for each in ("input", "linear_weight"):
        inputs[each].requires_grad_()  # type: ignore[union-attr]
    with on_path(path):
        expected = functional.linear_log_probs(**inputs).detach()  # type: ignore[arg-type]
        others = [
            functional.linear_log_probs(**inputs, return_entropy=True)[0],  # type: ignore[arg-type]
            functional.linear_log_probs(**inputs, recompute=True),  # type: ignore[arg-type]
            0 - functional.linear_cross_entropy(**inputs, reduction="none"),  # type: ignore[arg-type]
        ]
    assert all(torch.equal(expected, other.detach()) for other in others)


def test_a_module_in_evaluation() -> None:
    """Its weight is a parameter, so that a chunk has as many tokens as in training."""
    layer = LinearCrossEntropyLoss(K, V, dtype=torch.float32, device=DEVICE)
    inputs = loss_inputs((TOKENS,), K, V)
    with on_path("torch"):
        expected = layer(inputs["input"], inputs["target"])
        layer.eval()
        with torch.no_grad():
            assert torch.equal(expected, layer(inputs["input"], inputs["target"]))
