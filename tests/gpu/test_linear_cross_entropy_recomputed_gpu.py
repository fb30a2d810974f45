"""The loss head with ``recompute`` on a GPU: the gradient of some columns of logits at a time, in both kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_close
from fusedlayers.devices import assumed
from fusedlayers.functional.dispatch import decisions
from fusedlayers.planning import linear_cross_entropy_chunks as cutting
from tests.support.loss_operands import assert_loss_close, in_float64, loss_inputs, on_path, results
from tests.support.operands import DEVICE

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
MIB = 2**20
# Of a tile of dW few tokens decide, those whose target or whose likeliest class is there: one draw has some of them.
DRAWS, AGAIN = 12, 6
# In float32 torch itself differs by more from torch with another order of K, where few logits decide of a token.
PEAKS = {BFLOAT16: 5.0, FLOAT16: 5.0, FLOAT32: 1.0}
# As many SMs as there are, and few, each of which computes many tiles.
MACHINES: dict[str, dict[str, Any]] = {"all": {}, "few": {"sms": 7}, "generic": {"backend": "generic"}}


# Of float32 the errors are those of cuBLAS's sums, whose order depends on the number of columns.
@pytest.mark.xdist_group("logits")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("V", [32000, 50257])
def test_published_vocabularies(V: int, reduction: str, dtype: torch.dtype) -> None:
    """Two and three parts of the vocabulary, the last of which is ragged; a loss is scaled by a power of two."""
    draws = [loss_inputs((4, 512), 768, V, dtype, bias=True, ignored=200, peak=3.0) for _ in range(DRAWS)]
    upstream = None if reduction == "none" else [torch.tensor(-0.25, device=DEVICE)]
    assert_loss_close(*draws, path="recomputed", rows=None, again=AGAIN, reduction=reduction, upstream=upstream)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2048, 512, 8001), {"label_smoothing": 0.1, "z_loss": 1e-4}),
        ((1003, 320, 5003), {"softcap": 30.0, "logit_scale": 0.25}),
        ((1003, 328, 5003), {"weight": True, "label_smoothing": 0.1}),
        ((130, 16, 257), {}),
        ((64, 4096, 3000), {}),
    ],
    ids=str,
)
def test_options(
    sizes: tuple[int, int, int], options: dict[str, Any], machine: dict[str, Any], dtype: torch.dtype
) -> None:
    tokens, K, V = sizes
    weight, given = "weight" in options, {name: value for name, value in options.items() if name != "weight"}
    draws = [
        loss_inputs((tokens,), K, V, dtype, bias=True, weight=weight, ignored=tokens // 9, peak=PEAKS[dtype])
        for _ in range(DRAWS)
    ]
    with assumed(**machine):
        # Parts of 64 columns, and all of them at once.
        for rows in (tokens, None):
            assert_loss_close(*draws, path="recomputed", rows=rows, again=AGAIN, reduction="none", **given)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("options", [{"logit_scale": 1.25}, {"softcap": 30.0}], ids=str)
def test_log_probabilities_and_entropies(options: dict[str, Any], machine: dict[str, Any], dtype: torch.dtype) -> None:
    draws = [loss_inputs((1003,), 328, 5003, dtype, bias=True, ignored=100, peak=PEAKS[dtype]) for _ in range(DRAWS)]
    with assumed(**machine):
        for rows in (1003, None):
            given = {
                "path": "recomputed",
                "rows": rows,
                "again": AGAIN,
                "name": "linear_log_probs",
                "return_entropy": True,
            }
            assert_loss_close(*draws, **given, **options)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_logits_far_below_zero(machine: dict[str, Any]) -> None:
    """The largest of them is so far below that of what pads a row, 0, that their exponentials are infinite."""
    draws = [loss_inputs((300,), 64, 1001, BFLOAT16) for _ in range(DRAWS)]
    for inputs in draws:
        inputs["input"][:, 0], inputs["linear_weight"][:, 0] = 1.0, -256.0  # type: ignore[index]
    with assumed(**machine):
        assert_loss_close(*draws, path="recomputed", rows=None, again=AGAIN)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("K", [8, 64, 192, 256, 320, 2048])
def test_exact_integers(K: int, dtype: torch.dtype, machine: dict[str, Any]) -> None:
    """Fewer steps of the inner axis than stages, as many, and more; repeatedly, as a race need not show at once.

    Of every token one class has all of the probability: the gradient of its logits is 0, or 1 and -1 in two columns,
    times the scale, a power of two.
    """
    tokens, V = 1100, 3000
    torch.manual_seed(K)
    input = torch.randint(-2, 3, (tokens, K), device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randint(-2, 3, (V, K), device=DEVICE).to(dtype).requires_grad_()
    logits = input.detach().double() @ weight.detach().double().T
    best, places = logits.topk(2, dim=1)
    target = torch.where(torch.arange(tokens, device=DEVICE) % 2 == 0, places[:, 0], places[:, 0] % 50)
    target = torch.where(best[:, 0] == best[:, 1], -100, target)
    counts = (target != -100)[:, None]
    G = torch.zeros(tokens, V, device=DEVICE, dtype=torch.float64)
    scale = 1024.0
    G = scale * counts * (G.scatter(1, places[:, :1], 1.0) - torch.eye(V, device=DEVICE)[target.clamp(min=0)])
    expected = (G @ weight.detach().double()).to(dtype), (G.T @ input.detach().double()).to(dtype)
    assert G.any()
    with on_path("recomputed", None), assumed(**machine):
        for _ in range(20):
            loss = functional.linear_cross_entropy(input, weight, target, logit_scale=scale, reduction="sum")
            found = torch.autograd.grad(loss, (input, weight))
            for mine, exact in zip(found, expected, strict=True):
                assert torch.equal(mine, exact)


@pytest.mark.xdist_group("logits")
@pytest.mark.parametrize(
    ("sizes", "most"),
    [((8192, 4096, 128256), 1250), ((16384, 2048, 32000), 400), ((16384, 768, 50257), 250)],
    ids=str,
)
def test_memory_of_a_training_step(sizes: tuple[int, int, int], most: int) -> None:
    """Beyond the operands: dW, dx and its float32 sum, and 64 MiB; after the forward pass no more than statistics."""
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
            loss = functional.linear_cross_entropy(input, weight, target, recompute=True)
        assert dict(paths) == {"linear_cross_entropy fused": 1}
        forward = (torch.cuda.max_memory_allocated() - before) / MIB
        loss.backward()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    assert forward <= 10, f"{forward:.0f} MiB"
    assert peak <= most, f"{peak:.0f} MiB"


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("machine", [MACHINES["all"], MACHINES["generic"]], ids=["all", "generic"])
def test_more_than_two_to_the_31_logits(machine: dict[str, Any]) -> None:
    """And a gradient of as many elements at once: what the last tokens get is as close as torch's of them alone."""
    tokens, K, V = 18432, 64, 131072
    inputs = loss_inputs((tokens,), K, V, BFLOAT16)
    last = inputs | {name: inputs[name][-300:].clone() for name in ("input", "target")}  # type: ignore[index]
    assert tokens * V > 2**31
    upstream = torch.randn(tokens, device=DEVICE, dtype=BFLOAT16).float()
    alone = {"upstream": [upstream[-300:]], "reduction": "none"}
    oracle: Any = reference.linear_cross_entropy
    theirs, exact = (results(oracle, tensors, **alone) for tensors in (last, in_float64(last)))
    with on_path("recomputed", None), assumed(**machine), pytest.MonkeyPatch.context() as patch:
        for columns in (4096, V):
            patch.setattr(cutting, "choose_columns", lambda problem, columns=columns: columns)
            found = results(functional.linear_cross_entropy, inputs, upstream=[upstream], reduction="none")
            for name in ("result 0", "dinput"):
                mine, other, truth = found[name], theirs[name], exact[name]
                assert_close(mine[-300:], other, truth, name)
