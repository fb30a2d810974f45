"""The loss head on a GPU: large vocabularies, chunks whose sums are float32, graphs, equal bits, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional
from fusedlayers.devices import assumed
from fusedlayers.functional.dispatch import decisions
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.loss_operands import (
    CHUNK_ROWS,
    FLOATING,
    IGNORED,
    REDUCTIONS,
    assert_loss_close,
    loss_inputs,
    on_path,
    results,
)
from tests.support.operands import DEVICE

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# One chunk, chunks whose sum of dW is float32, and parts of the vocabulary.
EVERY_WAY = [("chunked", 4096), ("chunked", 640), ("recomputed", None)]
MIB = 2**20
# Of a tile of dW few tokens decide, those whose target or whose likeliest class is there: one draw has some of them.
DRAWS = 6


@pytest.mark.xdist_group("logits")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("V", [32000, 50257])
@pytest.mark.parametrize("rows", [4096, 2048, 640], ids=lambda rows: f"{rows} tokens of 4096")
def test_published_vocabularies(V: int, reduction: str, dtype: torch.dtype, rows: int) -> None:
    """One chunk, and several whose sum of dW is float32; a loss is scaled by a power of two.

    Losses of single tokens and log-probabilities have no chunks of tokens: see the tests with ``recompute``.
    """
    if dtype == FLOAT32 and rows < 4096:
        pytest.skip("the order of cuBLAS's float32 sums, and with it their error, depends on the number of rows")
    draws = [loss_inputs((4, 1024), 768, V, dtype, bias=True, ignored=400, peak=3.0) for _ in range(DRAWS)]
    upstream = [torch.tensor(-0.25, device=DEVICE)]
    assert_loss_close(*draws, rows=rows, reduction=reduction, upstream=upstream)


def test_a_loss_that_is_scaled_by_another_factor() -> None:
    """The gradients of the forward pass, of one chunk in bfloat16, times the factor, rounded once more."""
    inputs = loss_inputs((2048,), 2048, 32000, BFLOAT16)
    with on_path("chunked", 2048):
        one, other = (
            results(functional.linear_cross_entropy, inputs, upstream=[torch.tensor(factor, device=DEVICE)])
            for factor in (1.0, 0.3)
        )
    for name in ("dinput", "dlinear_weight"):
        gradient, scaled = one[name], other[name]
        assert torch.equal(scaled, (gradient.float() * torch.tensor(0.3, device=DEVICE)).bfloat16())


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1, "z_loss": 1e-4}, {"softcap": 30.0, "logit_scale": 0.25}, {"weight": True}],
    ids=str,
)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    weight = options.pop("weight", False)
    draws = [loss_inputs((2048,), 512, 32001, dtype, weight=weight, peak=8.0) for _ in range(DRAWS)]
    assert_loss_close(*draws, rows=640, **options)


@pytest.mark.xdist_group("logits")
@pytest.mark.parametrize(("path", "rows"), [("chunked", 4096), ("recomputed", None)])
def test_float16_with_a_loss_scale(path: str, rows: int | None) -> None:
    """Shares of a probability among many tokens are below the smallest float16 until the scale multiplies them."""
    draws = [loss_inputs((16384,), 128, 32000, FLOAT16) for _ in range(DRAWS)]
    scale = [torch.tensor(2.0**16, device=DEVICE)]
    assert_loss_close(*draws, path=path, rows=rows, upstream=scale)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("path", "rows"), EVERY_WAY)
def test_the_same_bits_every_time(reduction: str, path: str, rows: int | None) -> None:
    inputs = loss_inputs((4096,), 768, 50257, BFLOAT16, bias=True)
    with on_path(path, rows):
        first = results(functional.linear_cross_entropy, inputs, reduction=reduction)
        for _ in range(10):
            again = results(functional.linear_cross_entropy, inputs, reduction=reduction)
            for name, tensor in first.items():
                other = again[name]
                assert torch.equal(tensor, other), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("path", "rows"), [("chunked", 384), ("recomputed", CHUNK_ROWS)])
def test_a_graph_replays_what_is_launched(reduction: str, path: str, rows: int) -> None:
    inputs = loss_inputs((1024,), 256, 32000, BFLOAT16)
    leaves = {name: tensor.requires_grad_() for name in FLOATING if (tensor := inputs[name]) is not None}

    def step() -> tuple[Tensor, ...]:
        loss = functional.linear_cross_entropy(**leaves, target=inputs["target"], reduction=reduction)  # type: ignore[arg-type]
        return (loss.detach(), *torch.autograd.grad(loss.sum(), list(leaves.values())))

    with on_path(path, rows):
        assert_replays_like_launched(step, list(leaves.values()), replays=20)


@pytest.mark.xdist_group("logits")
@pytest.mark.parametrize(
    ("sizes", "most"),
    [((8192, 4096, 128256), 2300), ((16384, 2048, 32000), 570), ((16384, 768, 50257), 670)],
    ids=str,
)
def test_memory_of_a_training_step(sizes: tuple[int, int, int], most: int) -> None:
    """Beyond the operands, with dx and dW, as auto mode plans it."""
    tokens, K, V = sizes
    input = torch.randn(tokens, K, device=DEVICE, dtype=BFLOAT16).requires_grad_()
    weight = (torch.randn(V, K, device=DEVICE, dtype=BFLOAT16) / K**0.5).requires_grad_()
    target = torch.randint(V, (tokens,), device=DEVICE)
    for _ in range(2):
        input.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with decisions() as paths:
            functional.linear_cross_entropy(input, weight, target).backward()
        assert dict(paths) == {"linear_cross_entropy chunked": 1}
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    assert peak <= most, f"{peak:.0f} MiB"


@pytest.mark.xdist_group("large")
def test_more_than_two_to_the_31_logits() -> None:
    """All of them: chunks that are added up, and a chunk whose own logits are as many."""
    tokens, K, V = 18432, 64, 131072
    inputs = loss_inputs((tokens,), K, V, BFLOAT16)
    assert tokens * V > 2**31
    found = []
    for rows in (tokens, 4096):
        with on_path("chunked", rows):
            upstream = [torch.ones((), device=DEVICE)]
            found.append(results(functional.linear_cross_entropy, inputs, upstream=upstream, reduction="sum"))
    for name, tensor in found[0].items():
        if tensor is not None:
            torch.testing.assert_close(tensor, found[1][name], rtol=2e-2, atol=1e-3)
    input, weight, target = (inputs[name] for name in ("input", "linear_weight", "target"))
    last = input[-64:].clone().requires_grad_()
    F.cross_entropy(F.linear(last, weight).float(), target[-64:], reduction="sum", ignore_index=IGNORED).backward()
    dx = found[0]["dinput"]
    torch.testing.assert_close(dx[-64:], last.grad, rtol=2e-2, atol=1e-3)


# As many SMs as there are, and few, each of which computes many tiles; and where the sm90 kernels do not run.
MACHINES: dict[str, dict[str, Any]] = {"all": {}, "few": {"sms": 7}, "generic": {"backend": "generic"}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "log_probs": ("linear_log_probs", {}),
    "entropies": ("linear_log_probs", {"return_entropy": True}),
    **{reduction: ("linear_cross_entropy", {"reduction": reduction}) for reduction in REDUCTIONS},
    "recomputed mean": ("linear_cross_entropy", {"recompute": True}),
}


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [(), ("linear_weight",), ("input",)], ids=str)
@pytest.mark.parametrize("sizes", [(8192, 1024, 32000), (3001, 768, 50257)], ids=str)
def test_sampling_and_training_have_the_same_bits(
    sizes: tuple[int, int, int], frozen: tuple[str, ...], kind: str, machine: dict[str, Any], dtype: torch.dtype
) -> None:
    """Values without gradients, in inference mode, and those of a training step, whoever of both is trained."""
    tokens, K, V = sizes
    name, options = KINDS[kind]
    call = getattr(functional, name)
    inputs: dict[str, Any] = loss_inputs((tokens,), K, V, dtype, bias=True, ignored=100, peak=5.0)
    for each in ("input", "linear_weight"):
        inputs[each].requires_grad_(each not in frozen)
    with on_path("chunked", None), assumed(**machine):
        for _ in range(3):
            outputs = call(**inputs, **options)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            trained = [each.detach().clone() for each in outputs]
            sum(each.sum() for each in outputs).backward()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    sampled = call(**inputs, **options)
                sampled = sampled if isinstance(sampled, tuple) else (sampled,)
                assert all(torch.equal(one, other) for one, other in zip(trained, sampled, strict=True)), mode


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_log_probabilities_are_the_same_bits_with_entropies(machine: dict[str, Any]) -> None:
    inputs: dict[str, Any] = loss_inputs((4096,), 768, 50257, BFLOAT16, peak=5.0)
    with on_path("chunked", None), assumed(**machine), torch.no_grad():
        alone = functional.linear_log_probs(**inputs)
        assert torch.equal(alone, functional.linear_log_probs(**inputs, return_entropy=True)[0])
        assert torch.equal(alone, 0 - functional.linear_cross_entropy(**inputs, reduction="none"))
